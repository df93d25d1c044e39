"""One member against a real etcd: the core, a watch, a lease, heartbeat links, and a thread that writes.

The core's thread takes events from one queue and never waits for etcd. Writes go, in order, to a second thread:
unfenced ones (the own keys, a tomb) are tried until etcd takes them, fenced ones once, since only the core can say
whether they still make sense. What a fenced write changed is told to the core at once; the watch's echo comes later
and is recognised by its revision.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError, EtcdError, EtcdUnavailable
from elastic3d.etcd import (
    Compare,
    Delete,
    Delivery,
    EtcdClient,
    KeyValue,
    Lease,
    LeaseGone,
    LeaseKeeper,
    Operation,
    Put,
    Watch,
)
from elastic3d.etcd import watch as etcd_watch
from elastic3d.membership import events as e
from elastic3d.membership.core import Core
from elastic3d.membership.leader import Planner
from elastic3d.membership.links import Links
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Claim, End, MemberRecord, Proposal, Report, Tomb, decode, encode
from elastic3d.values import Generation

T = TypeVar("T")

TICK = 0.1
"""Seconds between ticks of the core: the resolution of its patience."""


class Member:
    """Takes part in the job under `root`, and tells its owner what to do.

    `act` is called on the member's thread with each local action, `heard` with each change of whether etcd answers;
    neither may block. `tell` may be called from any thread. `links` is owned by the caller, who opened it to know its
    port, and closed by `close`.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: str,
        record: MemberRecord,
        policy: Policy,
        planner: Planner,
        act: Callable[[e.Local], None],
        *,
        heard: Callable[[bool], None] = lambda there: None,
        noted: Callable[[e.Event], None] = lambda event: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._client, self._root, self._policy, self._clock = client, root, policy, clock
        self._act, self._heard, self._noted = act, heard, noted
        self._core = Core(record, policy, planner)
        self._inbox: queue.SimpleQueue[e.Event | threading.Event | None] = queue.SimpleQueue()
        self._writes: deque[tuple[e.Write, int]] = deque()
        self._wake_writer = threading.Condition()
        self._closed = False
        self._lease: Lease | None = None
        self._leases = LeaseKeeper(client)
        self._links: Links | None = None
        self._watch: Watch | None = None
        self._threads = [
            threading.Thread(target=self._run, name="elastic3d-member", daemon=True),
            threading.Thread(target=self._write_all, name="elastic3d-member-writes", daemon=True),
        ]

    def start(self, links: Links) -> None:
        """Join. A job that ended under this id makes room for a new one as soon as its last member is gone."""
        self._links = links
        self._clear_ended()
        for thread in self._threads:
            thread.start()
        self._watch = Watch(self._client, self._root, self._watched)

    def tell(self, event: e.Event) -> None:
        """Tell the core what happened here."""
        self._inbox.put(event)

    def settle(self) -> None:
        """Wait until what was told so far has been taken in; at most 2 seconds."""
        done = threading.Event()
        self._inbox.put(done)
        done.wait(timeout=2.0)

    def close(self) -> None:
        """Stop; give the lease back, so that nothing of this member stays in etcd. Idempotent."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        self._inbox.put(None)
        with self._wake_writer:
            self._wake_writer.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=5)
        if self._watch is not None:
            self._watch.close()
        if self._links is not None:
            self._links.close()
        if self._lease is not None:
            try:
                self._leases.revoke(self._lease, budget=1.0)
            except EtcdError:
                pass  # it runs out by itself
        self._leases.close()

    def _flush(self) -> None:
        """Give the last writes, a clean leave above all, two seconds."""
        end = self._clock.monotonic() + 2.0
        with self._wake_writer:
            while self._writes and self._clock.monotonic() < end:
                self._wake_writer.wait(timeout=0.1)

    def _clear_ended(self) -> None:
        """Wait for those who are about to go, for a lease at most: after that they are there to stay."""
        patience = self._clock.monotonic() + self._policy.lease + 1.0
        while True:
            items, _revision = self._client.range(self._root)
            by_key = {item.key.removeprefix(self._root): item for item in items}
            end = by_key.get("end")
            if end is None:
                return
            if not any(key.startswith("members/") for key in by_key):
                break
            if self._clock.monotonic() >= patience:
                return
            self._clock.sleep(TICK)
        wipe: list[Operation] = [Delete(self._root + "end"), Delete(self._root + "proposal")]
        wipe.append(Delete(self._root + "tombs/", prefix=True))
        if "generation" in by_key:
            # Its nodes are gone and nobody waits for them; its number is the newest token there was.
            key = self._root + "generation"
            last = decode(Generation, by_key["generation"].value, key)
            wipe.append(Put(key, encode(replace(last, nodes=(), spares=(), layout=None, tries=0, tried_at=-1))))
        self._client.txn([Compare.mod_revision(end.key, end.mod_revision)], wipe)

    # The core's thread.

    def _run(self) -> None:
        while not self._closed:
            event: e.Event | threading.Event | None
            try:
                event = self._inbox.get(timeout=TICK)
            except queue.Empty:
                event = e.Tick()
            if event is None:
                return
            if isinstance(event, threading.Event):
                event.set()
                continue
            if not isinstance(event, e.Tick):
                self._noted(event)
            for action in self._core.handle(event, self._clock.monotonic()):
                if isinstance(action, e.Watch):
                    assert self._links is not None
                    self._links.watch(action.peers)
                elif isinstance(action, e.Local):
                    self._act(action)
                else:
                    self._queue(action)

    def _queue(self, action: e.Write) -> None:
        expected = 0
        if isinstance(action, e.Bury):
            expected = self._core.view.revision(f"members/{action.name}")
        with self._wake_writer:
            if isinstance(action, e.PutReport) and self._writes and isinstance(self._writes[-1][0], e.PutReport):
                self._writes.pop()
            self._writes.append((action, expected))
            self._wake_writer.notify_all()

    # The watch's thread.

    def _watched(self, news: Delivery) -> None:
        match news:
            case etcd_watch.Snapshot():
                items = tuple(item for item in map(self._read, news.kvs) if item is not None)
                self._inbox.put(e.Listed(items=items, revision=news.revision, gap=news.gap))
            case etcd_watch.Changes():
                for change in news.changes:
                    told = self._read(change.kv) if change.kv is not None else self._gone(change.key, change.revision)
                    if told is not None:
                        self._inbox.put(told)
            case etcd_watch.Connected():
                self._heard(True)
                self._inbox.put(e.EtcdBack())
            case etcd_watch.Disconnected():
                self._heard(False)
                self._inbox.put(e.EtcdLost(since=news.since))
            case etcd_watch.Ended():
                self._inbox.put(e.Broken(detail=str(news.error)))

    def _read(
        self, item: KeyValue
    ) -> e.MemberPut | e.ReportPut | e.TombPut | e.LeaderPut | e.GenerationPut | e.ProposalPut | e.EndPut | None:
        kind, _, name = item.key.removeprefix(self._root).partition("/")
        at = item.mod_revision

        def record(of: type[T]) -> T:
            return decode(of, item.value, item.key)

        try:
            match kind:
                case "members":
                    return e.MemberPut(record=record(MemberRecord), order=item.create_revision, revision=at)
                case "reports":
                    return e.ReportPut(name=name, report=record(Report), revision=at)
                case "tombs":
                    return e.TombPut(name=name, tomb=record(Tomb), revision=at)
                case "leader":
                    return e.LeaderPut(claim=record(Claim), revision=at)
                case "generation":
                    return e.GenerationPut(generation=record(Generation), revision=at)
                case "proposal":
                    return e.ProposalPut(proposal=record(Proposal), revision=at)
                case "end":
                    return e.EndPut(end=record(End), revision=at)
                case _:
                    return None
        except ConfigurationError as error:
            # Garbage under somebody's key must not take the job down; what is ours to obey must be readable.
            if kind in ("generation", "proposal", "leader", "end"):
                self._inbox.put(e.Broken(detail=str(error)))
            return None

    def _gone(self, key: str, revision: int) -> e.Event | None:
        kind, _, name = key.removeprefix(self._root).partition("/")
        match kind:
            case "members":
                return e.MemberGone(name=name, revision=revision)
            case "leader":
                return e.LeaderGone(revision=revision)
            case "proposal":
                return e.ProposalGone(revision=revision)
            case _:
                return None

    # The writer's thread.

    def _write_all(self) -> None:
        while True:
            with self._wake_writer:
                while not self._writes:
                    if self._closed:
                        return
                    self._wake_writer.wait(timeout=0.5)
                action, expected = self._writes[0]
            done = self._write(action, expected)
            with self._wake_writer:
                if done and self._writes and self._writes[0][0] is action:
                    self._writes.popleft()
                    self._wake_writer.notify_all()
                elif not done:
                    if self._closed:
                        return
                    self._wake_writer.wait(timeout=0.2)

    def _write(self, action: e.Write, expected: int) -> bool:
        """Return whether this write needs no further try."""
        try:
            match action:
                case e.PutMember():
                    name = action.record.node.name
                    self._put(f"members/{name}", encode(action.record))
                    return True
                case e.PutReport():
                    self._put(f"reports/{self._core.record.node.name}", encode(action.report))
                    return True
                case e.Bury():
                    self._bury(action, expected)
                    self._inbox.put(e.WriteDone(write=action, ok=True))
                    return True
                case _:
                    self._inbox.put(e.WriteDone(write=action, ok=self._fenced(action)))
                    return True
        except LeaseGone:
            self._lease = None
            return False
        except EtcdError as error:
            if isinstance(action, e.FENCED):
                self._inbox.put(e.WriteDone(write=action, ok=False))
                return True
            # Waiting cures what is away, not what is refused.
            if not isinstance(error, EtcdUnavailable) and not self._closed:
                self._inbox.put(e.Broken(detail=str(error)))
                return True
            return False

    def _put(self, key: str, value: bytes) -> None:
        self._client.put(self._root + key, value, self._lease_id(), idempotent=True)

    def _lease_id(self) -> int:
        if self._lease is None or self._lease.lost is not None:
            self._lease = self._leases.grant(self._policy.lease, lambda lease, loss: self._lease_lost())
        return self._lease.id

    def _lease_lost(self) -> None:
        """Register again under a new lease before the old one's keys vanish, if it can be done in time."""
        if not self._closed:
            with self._wake_writer:
                self._writes.append((e.PutMember(record=self._core.record), 0))
                self._writes.append((e.PutReport(report=self._core.report), 0))
                self._wake_writer.notify_all()

    def _bury(self, action: e.Bury, expected: int) -> None:
        member, report = self._root + f"members/{action.name}", self._root + f"reports/{action.name}"
        tomb = Put(self._root + f"tombs/{action.name}", encode(action.tomb))
        for _try in range(3):
            out: list[Operation] = [Delete(member), Delete(report), tomb]
            result = self._client.txn([Compare.mod_revision(member, expected)], out, idempotent=True)
            if result.succeeded:
                self._inbox.put(e.TombPut(name=action.name, tomb=action.tomb, revision=result.revision))
                if expected:
                    self._inbox.put(e.MemberGone(name=action.name, revision=result.revision))
                return
            found = self._client.get(member)
            if found is None:
                expected = 0
            elif decode(MemberRecord, found.value, member).node.incarnation != action.tomb.incarnation:
                return
            else:
                expected = found.mod_revision

    def _fenced(self, action: e.Write) -> bool:
        """Run a leader's transaction and tell the core what it changed."""
        leader, record = self._root + "leader", self._root + "generation"
        proposal, end = self._root + "proposal", self._root + "end"
        match action:
            case e.Campaign():
                claim = Claim(name=self._core.record.node.name, incarnation=self._core.record.node.incarnation)
                put = Put(leader, encode(claim), self._lease_id())
                result = self._client.txn([Compare.mod_revision(leader, action.expected)], [put])
                told: list[e.Event] = [e.LeaderPut(claim=claim, revision=result.revision)]
            case e.Seal():
                fence = [Compare.mod_revision(leader, action.token), Compare.mod_revision(record, action.previous)]
                seal: list[Operation] = [Put(record, encode(action.generation)), Delete(proposal)]
                result = self._client.txn(fence, seal)
                told = [
                    e.GenerationPut(generation=action.generation, revision=result.revision),
                    e.ProposalGone(revision=result.revision),
                ]
            case e.Propose():
                fence = [Compare.mod_revision(leader, action.token), Compare.mod_revision(record, action.previous)]
                result = self._client.txn(fence, [Put(proposal, encode(action.proposal))])
                told = [e.ProposalPut(proposal=action.proposal, revision=result.revision)]
            case e.Withdraw():
                result = self._client.txn([Compare.mod_revision(leader, action.token)], [Delete(proposal)])
                told = [e.ProposalGone(revision=result.revision)]
            case e.PutEnd():
                fence = [Compare.mod_revision(leader, action.token)]
                result = self._client.txn(fence, [Put(end, encode(action.end))])
                told = [e.EndPut(end=action.end, revision=result.revision)]
            case _:
                raise AssertionError(action)
        for event in told if result.succeeded else ():
            self._inbox.put(event)
        return result.succeeded
