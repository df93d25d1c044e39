"""A model of etcd: one linear history behind three members with a delay and a bandwidth.

Modelled, because the safety or speed of members depends on it: revisions, compares and several operations in one
transaction; leases with a time to live, ended on a grid of 0.5 s, extended by a change of etcd's leader, lost when the
servers were stopped rather than killed, as etcd 3.4 does; data that are lost, or are those of a backup; watches that
lag, deliver in batches, resume from where they were, and must list again when that was compacted away; answers that are
lost although the write was applied; a commit pipeline of so many transactions a second; members whose links carry so
many bytes a second, so that ten thousand watchers of a large record are not free.

Keepalives are no events: a lease is held while its owner reaches etcd; its deadline is worked out when that ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from chaos.simulation.etcd_store import FORMED, Change, Lease, Store, tier_of
from chaos.simulation.loop import Loop
from elastic3d import etcd_keys as keys
from elastic3d.etcd import KeyValue, Put
from elastic3d.membership import events as e
from elastic3d.membership.reading import read
from elastic3d.membership.records import BaseUnknown
from elastic3d.membership.transactions import Transaction
from elastic3d.values import Generation

EXPIRY = 0.5
"""Seconds between etcd's checks for expired leases."""

BEATS = 4.0
"""Keepalives in a time to live, as the client sends them."""

MARGIN = 0.05
"""Of the time to live: how much earlier a client gives a lease up than etcd ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """How fast etcd is. Times in seconds, for three members of 10 Gbit/s over disks that take 1 to 3 ms to sync."""

    travel: tuple[float, float] = (0.0001, 0.0005)
    commit: tuple[float, float] = (0.001, 0.003)
    service: float = 0.00004
    fan_out: float = 0.000004
    members: int = 3
    bandwidth: float = 1.25e9


class Reading:
    """`read`, executed once for all members that read the same: a record of 10,000 nodes takes a while."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], tuple[Any, e.OfRoster | e.OfBoard | e.Broken | BaseUnknown | None]] = {}

    def __call__(
        self, root: str, item: KeyValue, *, base: Generation | None = None, whole: bytes | None = None
    ) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """Return the meaning of one key; raise BaseUnknown again if it was raised."""
        formed = item.key in FORMED
        key = (id(item), id(base) if formed else 0, id(whole) if formed else 0)
        reading = self._kept.get(key)
        if reading is None:
            said: e.OfRoster | e.OfBoard | e.Broken | BaseUnknown | None
            try:
                said = read(root, item, base=base, whole=whole)
            except BaseUnknown as unknown:
                said = unknown
            # The inputs are kept too: an identity is meaningful only while its object lives.
            reading = self._kept[key] = ((item, base, whole), said)
        if isinstance(reading[1], BaseUnknown):
            raise BaseUnknown(str(reading[1]))
        return reading[1]

    def forget(self) -> None:
        """Execute anew what is read from now on."""
        self._kept.clear()


class Watch:
    """One watcher of one tier. `deliver` gets changes, `lost` is called when it must list again.

    history: the one its position is in; `lost` is told whether etcd has another by now.
    """

    __slots__ = ("client", "closed", "deliver", "history", "lost", "position", "revision", "scheduled", "tier")

    def __init__(
        self,
        client: Client,
        tier: str,
        position: int,
        revision: int,
        deliver: Callable[[list[Change]], None],
        lost: Callable[[bool], None],
        history: int,
    ) -> None:
        self.history = history
        self.client, self.tier, self.deliver, self.lost = client, tier, deliver, lost
        self.position, self.revision = position, revision
        self.scheduled = self.closed = False


class Client:
    """A member's view of etcd: whether it reaches it, through which server, and its watches."""

    __slots__ = ("asleep", "closed", "lag", "reaches", "server", "watches")

    def __init__(self, server: int) -> None:
        self.server = server
        self.reaches = True
        self.asleep = self.closed = False
        self.lag = 0.0
        self.watches: dict[str, Watch] = {}


Answer = tuple[bool, int]
"""(whether the conditions held, the revision)."""


class Etcd:
    """The cluster. All its calls return at once; answers come by the loop."""

    def __init__(self, loop: Loop, random: Random, speeds: Speeds) -> None:
        self.loop, self.random, self.speeds = loop, random, speeds
        self.store = Store()
        self.up = True
        self.slow = 0.0
        self.electing_until = 0.0
        self.operations = 0
        self.bytes = 0
        self.reading = Reading()
        self.on_change: Callable[[list[Change]], None] = lambda changes: None
        self._watches: dict[str, dict[Watch, None]] = {}
        self._pipeline = 0.0
        self._links = [0.0] * speeds.members
        self._looking: dict[int, None] = {}
        self._revisions: list[tuple[float, int]] = []

    # Requests.

    def send(
        self, client: Client, transaction: Transaction, answer: Callable[[Answer | None], None], *, lost: bool = False
    ) -> None:
        """Run a transaction; `answer` gets None if no answer came. lost: it is applied, and its answer lost."""
        self.operations += 1
        self.bytes += sum(len(o.key) + len(o.value) for o in transaction.operations if isinstance(o, Put))
        if not self._reached(client):
            self.loop.later(self.random.uniform(0.05, 1.5), answer, None)
            return
        self.loop.at(self._commits_at(), self._commit, client, transaction, answer, lost)

    def _commits_at(self) -> float:
        speeds, now = self.speeds, self.loop.now
        arrives = max(now + self.random.uniform(*speeds.travel), self.electing_until)
        if self.slow:
            arrives += self.random.uniform(0.0, self.slow)
        self._pipeline = max(arrives, self._pipeline) + speeds.service
        return self._pipeline + self.random.uniform(*speeds.commit)

    def _commit(
        self, client: Client, transaction: Transaction, answer: Callable[[Answer | None], None], lost: bool
    ) -> None:
        if not self.up:
            self.loop.later(self.random.uniform(0.05, 1.5), answer, None)
            return
        if any(isinstance(o, Put) and o.lease and o.lease not in self.store.leases for o in transaction.operations):
            # "requested lease not found": nothing was written.
            self.loop.later(self.random.uniform(*self.speeds.travel), answer, (False, -1))
            return
        changes = self.store.apply(transaction)
        result = (changes is not None, self.store.revision)
        if changes:
            self._changed(changes)
        if lost:
            self.loop.later(1.0, answer, None)
            return
        self.loop.later(self.random.uniform(*self.speeds.travel), self._answer, client, answer, result)

    def _answer(self, client: Client, answer: Callable[[Answer | None], None], result: Answer) -> None:
        # Data for a stopped process waits in its socket.
        if self._reached(client) or client.asleep:
            answer(result)
        else:
            self.loop.later(1.0, answer, None)

    def read(self, client: Client, tier: str, answer: Callable[[list[Change], int, int, int], object]) -> None:
        """Read a tier; `answer` gets its keys, the revision, the position in its log, and the history they are of.

        The board comes with the whole generations beside it.
        """
        self.operations += 1
        self.loop.later(self.random.uniform(*self.speeds.travel), self._read, client, tier, answer)

    def _read(self, client: Client, tier: str, answer: Callable[[list[Change], int, int, int], object]) -> None:
        if client.closed:
            return
        if not self._reached(client):
            self.loop.later(0.3, self._read, client, tier, answer)
            return
        changes = self.store.all_of(tier)
        if tier == "board":
            changes += self.store.all_of(keys.WHOLE.strip("/"))
        size = sum(change.size for change in changes)
        self.bytes += size
        at = self._carry(client, size) + self.random.uniform(*self.speeds.travel)
        store = self.store
        self.loop.at(at, answer, changes, store.revision, len(store.log(tier)), store.history)

    # Leases.

    def grant(self, client: Client, ttl: float, answer: Callable[[Lease | None], None], *, kept: bool = True) -> None:
        """Grant a lease; `kept`, it lives as long as its owner reaches etcd."""
        self.operations += 1
        if not self._reached(client):
            self.loop.later(self.random.uniform(0.05, 1.5), answer, None)
            return
        self.loop.at(self._commits_at(), self._grant, client, ttl, answer, kept)

    def _grant(self, client: Client, ttl: float, answer: Callable[[Lease | None], None], kept: bool) -> None:
        if not self._reached(client):
            self.loop.later(self.random.uniform(0.05, 1.5), answer, None)
            return
        lease = self.store.grant(ttl, self.loop.now)
        if kept:
            lease.deadline = None
        else:
            self._look(lease)
        answer(lease)

    def revoke(self, lease: Lease) -> None:
        """End a lease now, as its owner or an operator does."""
        if not lease.over:
            self.operations += 1
            self._ended(lease)

    def keep(self, lease: Lease) -> bool:
        """Return whether a lease was still there to be kept alive from now on."""
        if lease.over:
            return False
        lease.deadline = None
        return True

    def lapse(self, lease: Lease) -> float:
        """Take note that no more keepalives of a lease come; return when the newest was sent."""
        now = self.loop.now
        beat = lease.ttl / BEATS
        sent = now - (now - lease.granted) % beat
        if not lease.over and lease.deadline is None:
            lease.deadline = sent + lease.ttl
            self._look(lease)
        return sent

    def _look(self, lease: Lease) -> None:
        if lease.id not in self._looking and lease.deadline is not None:
            self._looking[lease.id] = None
            when = math.ceil(max(lease.deadline, self.loop.now + 0.001) / EXPIRY) * EXPIRY
            self.loop.at(when, self._expire, lease)

    def _expire(self, lease: Lease) -> None:
        self._looking.pop(lease.id, None)
        if lease.over or lease.deadline is None:
            return
        if self.up and self.loop.now >= lease.deadline and self.loop.now >= self.electing_until:
            self._ended(lease)
        else:
            self._look(lease)

    def _ended(self, lease: Lease) -> None:
        changes = self.store.end(lease)
        if changes:
            self._changed(changes)

    # Watches.

    def watch(
        self,
        client: Client,
        tier: str,
        position: int,
        revision: int,
        deliver: Callable[[list[Change]], None],
        lost: Callable[[bool], None],
        history: int = 0,
    ) -> Watch:
        """Deliver the changes of a tier from a position of its log on, in the history it was listed in."""
        watch = Watch(client, tier, position, revision, deliver, lost, history)
        client.watches[tier] = watch
        self._watches.setdefault(tier, {})[watch] = None
        self.resume(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Stop delivering."""
        watch.closed = True
        self._watches[watch.tier].pop(watch, None)
        watch.client.watches.pop(watch.tier, None)

    def resume(self, watch: Watch) -> None:
        """Deliver what a watch has not seen, or report that it was compacted away or that etcd was rolled back."""
        if self.rolled_back(watch):
            self.unwatch(watch)
            watch.lost(True)
        elif watch.revision + 1 <= self.store.compacted:
            self.unwatch(watch)
            watch.lost(False)
        elif watch.position < len(self.store.log(watch.tier)):
            self._schedule(watch)

    def rolled_back(self, watch: Watch) -> bool:
        """Return what a client finds out when it resumes: whether etcd has another history than it delivered."""
        return watch.history != self.store.history

    def _changed(self, changes: list[Change]) -> None:
        self._revisions.append((self.loop.now, self.store.revision))
        self.on_change(changes)
        tiers = dict.fromkeys(tier_of(change.key) for change in changes)
        for tier in tiers:
            for watch in self._watches.get(tier, ()):
                if not watch.scheduled and watch.client.reaches:
                    self._schedule(watch)

    def _schedule(self, watch: Watch) -> None:
        """Send a watch its new changes over the link of its server, after all that is queued there."""
        watch.scheduled = True
        speeds = self.speeds
        log = self.store.log(watch.tier)
        size = sum(change.size for change in log.between(watch.position, len(log)))
        carried = self._carry(watch.client, size)
        lag = self.random.uniform(0.0, watch.client.lag) if watch.client.lag else 0.0
        self.loop.at(carried + lag + self.random.uniform(*speeds.travel), self._deliver, watch, len(log), size)

    def _carry(self, client: Client, size: int) -> float:
        """Return when a member has sent so many bytes to a client."""
        server = client.server % len(self._links)
        begins = max(self.loop.now, self._links[server])
        self._links[server] = begins + self.speeds.fan_out + size / self.speeds.bandwidth
        return self._links[server]

    def _deliver(self, watch: Watch, until: int, size: int) -> None:
        watch.scheduled = False
        if watch.closed or not self._reached(watch.client):
            return
        log = self.store.log(watch.tier)
        until = min(until, len(log))
        changes = log.between(watch.position, until)
        forgotten = len(changes) < until - watch.position
        if forgotten or (changes and changes[0].revision <= self.store.compacted):
            self.unwatch(watch)
            watch.lost(False)
            return
        self.bytes += size
        watch.position = until
        if changes:
            watch.revision = changes[-1].revision
            watch.deliver(changes)
        if watch.position < len(log) and not watch.closed:
            self._schedule(watch)

    # Faults.

    def _reached(self, client: Client) -> bool:
        return self.up and client.reaches

    def elect(self, seconds: float) -> None:
        """Change etcd's leader: nothing is committed meanwhile, and every lease is extended."""
        self.electing_until = max(self.electing_until, self.loop.now + seconds)
        self.loop.at(self.electing_until, self.extend)

    def extend(self) -> None:
        """Renew every lease in full, as a new leader does."""
        for lease in self.store.leases.values():
            if lease.deadline is not None:
                lease.deadline = max(lease.deadline, self.loop.now + lease.ttl)

    def roll_back(self, since: float) -> None:
        """Restore the data of that time, none if it is before the first: nobody may be connected."""
        assert not self.up
        self._revisions = [(at, revision) for at, revision in self._revisions if at <= since]
        self.store.roll_back(self._revisions[-1][1] if self._revisions else 1, self.loop.now)
        for lease in self.store.leases.values():
            self._looking.pop(lease.id, None)
            self._look(lease)

    def compact(self) -> None:
        """Answer for no change up to now any more."""
        self.store.compacted = self.store.revision

    def forget(self, seconds: float) -> None:
        """Keep the changes of the last `seconds` alone: watches that are further behind must list again.

        The data of no earlier time, and none of these either, can be restored from then on.
        """
        at = bisect_right(self._revisions, self.loop.now - seconds, key=lambda known: known[0])
        if at:
            self.store.forget(self._revisions[at - 1][1])
            del self._revisions[:at]
        self.reading.forget()
