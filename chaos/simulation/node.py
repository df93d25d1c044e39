"""One member in virtual time: the production core, with its driver's rules for queues, leases and repeated writes.

The rules are those of `membership.driver.writer`: writes go out in order, one at a time; a report that waits is
replaced by a newer one; a write of the member's own is tried until etcd takes it, a fenced one once, because only the
core can say whether it still makes sense. A lease is given up by the member's own clock before etcd can have ended it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from chaos.simulation.clock import HostClock
from chaos.simulation.etcd import MARGIN, Answer, Client
from chaos.simulation.etcd_store import ROOT, Change, Lease, tier_of
from chaos.simulation.network import State
from elastic3d import etcd_keys as keys
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership import transactions
from elastic3d.membership.machine.core import Core
from elastic3d.membership.policy import Policy
from elastic3d.membership.reading import Reader
from elastic3d.membership.records import BaseUnknown, MemberRecord, ReasonToGoBack

if TYPE_CHECKING:
    from chaos.simulation.world import World

RETRY = 0.2
"""Seconds before one of the member's own writes is tried again."""

SOONEST = 0.01
"""Seconds between two ticks, whatever the core asks for."""

FLUSH = 2.0
"""Seconds that an ending member allows its last writes."""

DECODING = 1.5e-7
"""Processor seconds that a byte of news costs a member."""

APPLYING = 5e-6
"""Processor seconds per node of a generation that arrives as a change."""


class Member:
    """One process that takes part, from its start to its end."""

    def __init__(
        self, world: World, host: int, record: MemberRecord, clock: HostClock, said: tuple[ReasonToGoBack, ...] = ()
    ) -> None:
        self.world, self.host, self.clock, self.record = world, host, clock, record
        self.id = record.node.id
        self.name = record.node.name
        self.state = State.RUNNING
        self.core = Core(record, world.policy, world.planner, world.setting.judge, said=said)
        self.client = Client(server=host)
        self.started = world.loop.now
        self.etcd_lost = False
        self.exit: acts.Exit | None = None
        self.deaf = self.noticed = self.raises = self.sticks = self.slow = False
        self.cuts = 0
        self._inbox: list[e.Event] = []
        self._turning = False
        self._alarm_at: float | None = None
        self._writes: deque[acts.Write] = deque()
        self._busy = False
        self._lease: Lease | None = None
        self._lease_until = 0.0
        self._contact = 0
        self._heard_at = world.loop.now
        self._processor = 0.0
        self._roster_watches = 0
        self._reader = Reader(ROOT, read=world.etcd.reading)
        self._asleep: list[tuple[acts.Write, Answer | None, int]] = []
        world.network.add(self)

    @property
    def policy(self) -> Policy:
        """The job's."""
        return self.world.policy

    @property
    def alive(self) -> bool:
        """Whether the process is there, stopped or not."""
        return self.state in (State.RUNNING, State.PAUSED)

    @property
    def leaving(self) -> bool:
        """Whether it was notified or ordered to leave."""
        return self.noticed or ROOT + keys.drain(self.name) in self.world.etcd.store.tiers.get("roll", {})

    def start(self) -> None:
        """Begin to watch the board; all else follows from the core's actions."""
        self._reach()
        self._list("board", False)

    def tell(self, event: e.Event) -> None:
        """Put an event into the core's queue."""
        if self.alive and not self.core.exited:
            self._inbox.append(event)
            if not self._turning:
                self._turning = True
                self.world.loop.later(0.0002, self._turn)

    # The core's thread.

    def _turn(self) -> None:
        self._turning = False
        if self.state is not State.RUNNING or self.core.exited:
            return
        events = self._inbox or [e.Tick()]
        self._inbox = []
        core, world = self.core, self.world
        actions = core.handle(events, self.clock.monotonic())
        for action in actions:
            world.acted(self, action)
            self._act(action)
        if not core.exited:
            self._arm()

    def _arm(self) -> None:
        """Wake the core when it asks for it; an earlier alarm notices a later request."""
        wish = self.core.alarm(self.clock.monotonic())
        if wish is None:
            return
        at = max(self.clock.virtual(wish), self.world.loop.now + SOONEST)
        if self._alarm_at is None or at < self._alarm_at - 1e-9:
            self._alarm_at = at
            self.world.loop.at(at, self._alarm, at)

    def _alarm(self, at: float) -> None:
        if self._alarm_at != at:
            return
        self._alarm_at = None
        if self.state is not State.RUNNING or self.core.exited:
            return
        now = self.clock.monotonic()
        wish = self.core.alarm(now)
        if wish is None:
            return
        if wish <= now + 1e-6:
            if not self._turning:
                self._turn()
        else:
            self._arm()

    def _act(self, action: acts.Action) -> None:
        world = self.world
        match action:
            case acts.WatchPeers():
                world.network.watch(self, action)
            case acts.Probe():
                world.network.probe(self, action.peers)
            case acts.WatchRoster(on=True):
                if "roll" not in self.client.watches:
                    self._list("roll", False)
            case acts.WatchRoster():
                self._roster_watches += 1
                if "roll" in self.client.watches:
                    world.etcd.unwatch(self.client.watches["roll"])
            case acts.Prepare():
                world.trainers.prepare(self, action.generation)
            case acts.StartTrainers():
                world.trainers.go(self, action.generation)
            case acts.AskLeave():
                world.trainers.leave(self, action.key)
            case acts.Stop():
                world.trainers.stop(self, action.key)
            case acts.Fence():
                world.checkpoints.fence(action.number, action.distrusted)
            case acts.Commit():
                world.checkpoints.commit(action.number, action.saved)
                self.tell(e.Settled(saved=action.saved))
            case acts.Draining() | acts.Awaiting() | acts.Unreachable() | acts.Concluded():
                pass
            case acts.LetGo():
                # Nobody renews it from here on: it expires, and the member's next write gets another.
                if self._lease is not None:
                    world.etcd.lapse(self._lease)
                    self._lease = None
            case acts.Exit():
                self.exit = action
                world.loop.later(RETRY, self._close, world.loop.now + FLUSH)
            case _:
                self._queue(action)

    # The watch's thread.

    def _list(self, tier: str, gap: bool, rolled_back: bool = False) -> None:
        roster_watches = self._roster_watches
        self.world.etcd.read(
            self.client, tier, lambda *listed: self._listed(tier, gap, rolled_back, roster_watches, *listed)
        )

    def _listed(
        self,
        tier: str,
        gap: bool,
        rolled_back: bool,
        roster_watches: int,
        changes: list[Change],
        revision: int,
        position: int,
        history: int,
    ) -> None:
        if not self.alive or (tier == "roll" and roster_watches != self._roster_watches):
            return
        if tier == "board":
            items = self._reader.listed([change.item for change in changes if change.item is not None])
        else:
            items = [change.event for change in changes if change.event is not None]
        news = e.Listed(
            tier=e.Tier(tier),
            items=tuple(i for i in items if not isinstance(i, e.Broken)),
            revision=revision,
            gap=gap,
            rolled_back=rolled_back,
        )
        self._digest(sum(change.size for change in changes) * DECODING, [news, e.EtcdBack()])
        self.etcd_lost = False
        self._heard_at = self.world.loop.now
        etcd = self.world.etcd
        etcd.watch(
            self.client, tier, position, revision, self._delivered, lambda past: self._list(tier, True, past), history
        )

    def _delivered(self, changes: list[Change]) -> None:
        self._heard_at = self.world.loop.now
        events: list[e.Event] = []
        seconds, unknown = 0.0, False
        for change in changes:
            seconds += change.size * DECODING
            try:
                said = self._said(change)
            except BaseUnknown:
                unknown = True
                break
            if change.whole is not None and isinstance(said, e.GenerationPut | e.ProposalPut):
                formed = said.generation if isinstance(said, e.GenerationPut) else said.proposal.generation
                seconds += (len(formed.nodes) + len(formed.spares)) * APPLYING
            if said is not None:
                events.append(said)
        self._digest(seconds, events)
        if unknown:
            self.world.etcd.unwatch(self.client.watches["board"])
            self._list("board", True)

    def _said(self, change: Change) -> e.OfRoster | e.OfBoard | e.Broken | None:
        if tier_of(change.key) != "board":
            return change.event
        return self._reader.changed(change.key, change.item, change.revision)

    def _digest(self, seconds: float, events: list[e.Event]) -> None:
        """Pass news to the core once the processor has decoded them."""
        loop = self.world.loop
        self._processor = max(self._processor, loop.now) + seconds
        if self._processor - loop.now < 0.0005:
            for event in events:
                self.tell(event)
        else:
            loop.at(self._processor, self._tell_all, events)

    def _tell_all(self, events: list[e.Event]) -> None:
        for event in events:
            self.tell(event)

    # The writer's thread.

    def _queue(self, write: acts.Write) -> None:
        waiting = self._writes[-1] if len(self._writes) > (1 if self._busy else 0) else None
        if waiting is not None and acts.replaces(write, waiting):
            self._writes.pop()
        self._writes.append(write)
        self._pump()

    def _pump(self) -> None:
        if self._busy or not self._writes or self.state is not State.RUNNING:
            return
        self._busy = True
        write = self._writes[0]
        etcd = self.world.etcd
        ttl = transactions.lease_of(write, self.policy.lease)
        if transactions.own_lease(write):
            if self._lease is None:
                etcd.grant(self.client, self.policy.lease, lambda lease: self._granted(write, lease))
            else:
                self._send(write, self._lease.id)
        elif ttl is not None:
            etcd.grant(
                self.client,
                ttl,
                lambda lease: self._send(write, lease.id) if lease is not None else self._answered(write, None),
                kept=False,
            )
        else:
            self._send(write, 0)

    def _granted(self, write: acts.Write, lease: Lease | None) -> None:
        if not self.alive:
            if lease is not None:
                self.world.etcd.lapse(lease)
            return
        if lease is None:
            self._answered(write, None)
            return
        self._lease = lease
        self._lease_until = self.world.loop.now + lease.ttl * (1 - MARGIN)
        if not self.client.reaches:
            self._lapse()
        self._send(write, lease.id)

    def _send(self, write: acts.Write, lease: int) -> None:
        if not self.alive:
            return
        deaf = self.deaf and isinstance(write, acts.Fenced)
        if deaf:
            self.deaf = self.noticed = False
        brevity = self.world.setting.brevity
        transaction = transactions.transaction(ROOT, self.record.node, write, lease, brevity=brevity)
        self.world.etcd.send(self.client, transaction, lambda answer: self._answered(write, answer, lease), lost=deaf)

    def _answered(self, write: acts.Write, answer: Answer | None, lease: int = 0) -> None:
        if not self.alive:
            return
        if self.state is State.PAUSED:
            self._asleep.append((write, answer, lease))
            return
        fenced = isinstance(write, acts.Fenced)
        if answer is None and not fenced:
            self.world.loop.later(RETRY, self._again)
            return
        if answer is not None and answer == (False, -1):
            if transactions.own_lease(write):
                self._lose(self._lease)
            self.world.loop.later(RETRY, self._again)
            return
        self._writes.popleft()
        self._busy = False
        ok = answer is not None and answer[0]
        # No key remains under a lease whose end was already reported.
        over = transactions.own_lease(write) and (self._lease is None or self._lease.id != lease)
        if ok and not over:
            assert answer is not None
            for event in transactions.events_of(self.record.node, write, answer[1]):
                self.tell(event)
        if fenced or isinstance(write, acts.Bury | acts.PutDoubt):
            self.tell(e.WriteDone(write=write, ok=ok))
        self._pump()

    def _again(self) -> None:
        self._busy = False
        # Of two reports of its own only the newer is worth sending.
        if len(self._writes) > 1 and isinstance(self._writes[0], acts.PutReport):
            newest = [w for w in self._writes if isinstance(w, acts.PutReport)]
            if len(newest) > 1:
                self._writes.popleft()
        self._pump()

    # Reachability of etcd.

    def reach(self, within: float = 0.5) -> None:
        """Find out, a moment later, whether etcd can be reached."""
        self._contact += 1
        reaches = self.world.etcd.up and not self.cuts and self.state is State.RUNNING
        if self.cuts or not self.world.etcd.up:
            self.client.asleep = False
        if not reaches:
            if self.client.reaches:
                self.client.reaches = False
                self._lapse()
            if self.state is State.RUNNING:
                delay = self.world.random.uniform(0.05, 0.6) if not self.world.etcd.up else 3.0
                self.world.loop.later(delay, self._lost, self._contact)
        else:
            self.world.loop.later(self.world.random.uniform(0.0, within), self._back, self._contact)

    def _reach(self) -> None:
        self.client.reaches = self.world.etcd.up and not self.cuts
        if not self.client.reaches:
            self.reach()

    def _lost(self, contact: int) -> None:
        if contact == self._contact and self.state is State.RUNNING:
            self.etcd_lost = True
            self.tell(e.EtcdLost(since=self._heard_at + self.clock.origin))

    def _back(self, contact: int) -> None:
        if contact != self._contact:
            return
        self.client.reaches = True
        if self.etcd_lost:
            self.etcd_lost = False
            self.tell(e.EtcdBack())
        self._heard_at = self.world.loop.now
        lease = self._lease
        if lease is not None:
            if self.world.etcd.keep(lease):
                self._lease_until = self.world.loop.now + lease.ttl * (1 - MARGIN)
            else:
                self._lose(lease)
        for watch in list(self.client.watches.values()):
            self.world.etcd.resume(watch)
        self._pump()

    def _lapse(self) -> None:
        if self._lease is not None:
            sent = self.world.etcd.lapse(self._lease)
            self._lease_until = sent + self._lease.ttl * (1 - MARGIN)
            self.world.loop.at(self._lease_until, self._expire, self._lease)

    def _expire(self, lease: Lease) -> None:
        if self.state is State.RUNNING and not self.client.reaches and self.world.loop.now >= self._lease_until:
            self._lose(lease)

    def lease_ended(self, lease: Lease) -> None:
        """Learn from an answer to a keepalive that the lease has ended."""
        if self._lease is lease and self.state is State.RUNNING and self.client.reaches:
            self._lose(lease)

    def _lose(self, lease: Lease | None) -> None:
        if lease is not None and self._lease is lease:
            self._lease = None
            self.tell(e.Unregistered())

    @property
    def lease(self) -> Lease | None:
        """This member's lease, as far as the process knows."""
        return self._lease

    # Stopping, resuming and ending.

    def pause(self) -> None:
        """Stop the process where it is."""
        if self.state is State.RUNNING:
            self.client.asleep = self.client.reaches
            self.state = State.PAUSED
            self.reach()
            self.world.network.changed(self)

    def wake(self) -> None:
        """Resume it: whatever came meanwhile is waiting for it."""
        if self.state is not State.PAUSED:
            return
        self.state = State.RUNNING
        lease = self._lease
        if lease is not None and self.world.loop.now >= self._lease_until:
            self._lose(lease)
        if self._inbox or self._alarm_at is None:
            self._turning = True
            self.world.loop.later(0.0002, self._turn)
        asleep, self._asleep = self._asleep, []
        for write, answer, under in asleep:
            self._answered(write, answer, under)
        # A connection that nobody broke still exists.
        self.reach(0.01 if self.client.asleep else 0.5)
        self.client.asleep = False
        self.world.network.changed(self)
        self._pump()

    def end(self, state: State) -> None:
        """End the process abruptly: its host refuses, or is silent."""
        if not self.alive:
            return
        self.state = state
        self.client.reaches, self.client.closed = False, True
        self._contact += 1
        if self._lease is not None:
            self.world.etcd.lapse(self._lease)
        for watch in list(self.client.watches.values()):
            self.world.etcd.unwatch(watch)
        self.world.trainers.stop_all(self, silent=state is State.VANISHED)
        self.world.network.changed(self)

    def _close(self, latest: float) -> None:
        """End like an exiting process: once the last writes are out and the lease is revoked."""
        if not self.alive:
            return
        if self.state is State.PAUSED or (self._writes and self.world.loop.now < latest):
            self.world.loop.later(0.1, self._close, latest)
            return
        lease, reaches = self._lease, self.client.reaches
        self.end(State.ENDED)
        if lease is not None and reaches:
            self.world.etcd.revoke(lease)
        self.world.closed(self)
