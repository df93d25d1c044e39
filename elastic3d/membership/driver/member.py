"""One member against a real etcd: the core, its watches, a writer with a lease, and heartbeat links.

The core's thread takes everything that waits in one queue, asks the core what to do, and sleeps until there is more or
the core wants to be asked again. It never waits for etcd: writes go to the writer's
thread. The board is always watched, the roster while the core wants it.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic3d import etcd_keys as keys
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.etcd import Delivery, EtcdClient, Watch
from elastic3d.etcd import watch as etcd_watch
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership import reading
from elastic3d.membership.driver.ended import make_room
from elastic3d.membership.driver.goodput import GoodputKeeping
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.probing import probe
from elastic3d.membership.driver.writer import MemberWriter
from elastic3d.membership.machine.core import Core
from elastic3d.membership.machine.situation import Ladder, Planner
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import BaseUnknown, MemberRecord, Pulse, ReasonToGoBack
from elastic3d.membership.stalls import Judge
from elastic3d.trust.agreement import Agreement, SecretNews, What
from elastic3d.values import Node

PULSE = 5.0
"""Seconds between two pulses of a member, at least."""

PULSES = 100
"""Pulses a second of all members together, at most."""

BOARD = 0
"""Number of the board's watch; the roster's, of which there can be several one after the other, have greater ones."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """News of one of the watches."""

    watch: int
    event: e.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class _SecretSeen:
    """The value under the key of the run's secret, None for none."""

    value: bytes | None = field(repr=False)
    revision: int


_Item = e.Event | _Heard | _SecretSeen | threading.Event | None


class Member:
    """Takes part in the job under `root`, and tells its owner what to do.

    `act` is called on the member's thread with each local action, `heard` whenever etcd begins or ceases to answer,
    `noted` with every event the core takes in, `trusted` with every change of the run's secret, which is `secret` at
    the start ("" for a member that has none to keep), `pulse` when the next pulse is due, and while this member leads
    `planner` for layouts, `judge` for why nothing moves, `ladder` for memory that runs out and, on the writer's thread,
    `goodput` for the account of the run's time; none may block. `tell` may be called from any thread. The owner closes
    client and links after this; after `Exit(rejoin=True)` it may close this and start another member, of a new
    incarnation, over the same ones, with what this one has `said`.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: str,
        record: MemberRecord,
        policy: Policy,
        planner: Planner,
        act: Callable[[acts.Local], None],
        *,
        pulse: Callable[[], Pulse],
        heard: Callable[[bool], None] = lambda there: None,
        noted: Callable[[e.Event], None] = lambda event: None,
        secret: str = "",
        trusted: Callable[[SecretNews], None] = lambda news: None,
        judge: Judge | None = None,
        ladder: Ladder | None = None,
        goodput: GoodputKeeping | None = None,
        said: tuple[ReasonToGoBack, ...] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self._client, self._root, self._policy, self._clock = client, root, policy, clock
        self._act, self._heard, self._noted = act, heard, noted
        self._agreement, self._trusted = Agreement(secret) if secret else None, trusted
        self._core = Core(record, policy, planner, judge, ladder, said)
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._writer = MemberWriter(
            client,
            root,
            record.node,
            policy.lease,
            self._inbox.put,
            pulse,
            self._period,
            clock,
            token=lambda: self._core.view.token if self._core.leads else 0,
            goodput=goodput,
        )
        self._links: Links | None = None
        self._board: Watch | None = None
        self._roster: Watch | None = None
        self._roster_watches = BOARD
        self._there = self._away = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def node(self) -> Node:
        """The incarnation this is."""
        return self._core.record.node

    @property
    def said(self) -> tuple[ReasonToGoBack, ...]:
        """Why the run goes back, as far as no record has it; to be asked once this is closed."""
        return self._core.report.goes_back

    def start(self, links: Links, *, again: bool = False, end_seen: int | None = None) -> bool:
        """Join. A job that ended under this id makes room for a new one as soon as its last member is gone.

        again: rejoin the job that this process took part in, whatever became of it. end_seen: see `make_room`. Returns
        False if the job that this node was started for is over: it does not join, and `act` gets an `Exit`.
        """
        # A full collection visits every object of torch's modules, 0.3 s of computing in which every thread stands
        # still: on a busy machine that is long enough for the neighbours to take this node for dead.
        gc.freeze()
        self._links = links
        links.speak_for(self.node.id)
        if not again:
            end = make_room(self._client, self._root, self._policy.lease, self._clock, end_seen)
            if end is not None:
                detail = "the job ended before this node joined it" + (f": {end.detail}" if end.detail else "")
                self._act(acts.Exit(failed=end.failed, detail=detail))
                return False
        self._thread = threads.start(
            self._decide, name="elastic3d-member", edge=threads.Edge.ALONE, failed=self._broken
        )
        self._writer.start()
        self._board = self._watch(keys.BOARD, e.Tier.BOARD, BOARD)
        return True

    def tell(self, event: e.Event) -> None:
        """Tell the core what happened here."""
        self._inbox.put(event)

    def settle(self) -> None:
        """Wait until all events passed to `tell` so far have been handled, at most 2 seconds."""
        done = threading.Event()
        self._inbox.put(done)
        done.wait(timeout=2.0)

    def stop(self) -> None:
        """Do nothing more, like a killed process: this member's keys in etcd are left to their lease. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        for watch in (self._board, self._roster):
            if watch is not None:
                watch.close()
        if self._links is not None:
            self._links.watch(acts.WatchPeers(peers=()))
        self._writer.stop()

    def close(self) -> None:
        """Stop, after at most two seconds for the last writes if etcd is there, and give back the lease. Idempotent."""
        if not self._closed and self._there:
            self._writer.flush(2.0)
        self.stop()
        self._writer.close()

    def _period(self) -> float:
        generation = self._core.view.generation
        members = 0 if generation is None else len(generation.nodes) + len(generation.spares)
        return max(PULSE, members / PULSES)

    # The core's thread.

    def _broken(self, error: BaseException) -> None:
        """Leave: a member that decides nothing must not look alive."""
        self._act(acts.Exit(failed=True, detail=f"the membership failed: {type(error).__name__}: {error}"))

    def _decide(self) -> None:
        while not self._closed:
            batch = self._gather()
            events: list[e.Event] = []
            for item in batch:
                if isinstance(item, _Heard):
                    # Late events of a closed watch would be taken for those of the current one.
                    if item.watch in (BOARD, self._roster_watches):
                        events.append(item.event)
                elif isinstance(item, _SecretSeen):
                    self._see_secret(item)
                elif item is not None and not isinstance(item, threading.Event):
                    events.append(item)
            self._handle(events)
            self._restore_secret()
            for item in batch:
                if isinstance(item, threading.Event):
                    item.set()
            if None in batch:
                return

    def _gather(self) -> list[_Item]:
        """Wait for items, or until the core wants to be asked; return all that came, or a Tick if none did."""
        now = self._clock.monotonic()
        alarm = self._core.alarm(now)
        try:
            items: list[_Item] = [self._inbox.get(timeout=None if alarm is None else max(0.001, alarm - now))]
        except queue.Empty:
            return [e.Tick()]
        while True:
            try:
                items.append(self._inbox.get_nowait())
            except queue.Empty:
                return items

    def _handle(self, events: list[e.Event]) -> None:
        if not events:
            return
        for event in events:
            self._noted(event)
        for action in self._core.handle(events, self._clock.monotonic()):
            match action:
                case acts.WatchPeers():
                    assert self._links is not None
                    self._links.watch(action)
                case acts.Probe():
                    self._probe(action.peers)
                case acts.LetGo():
                    self._writer.let_go()
                case acts.WatchRoster():
                    self._watch_roster(action.on)
                case _ if isinstance(action, acts.Local):
                    self._act(action)
                case _:
                    self._writer.write(action)

    def _see_secret(self, seen: _SecretSeen) -> None:
        if self._agreement is not None:
            news = self._agreement.saw(seen.value, seen.revision)
            if news is not None:
                self._trusted(news)

    def _restore_secret(self) -> None:
        due = None if self._agreement is None else self._agreement.restore(leads=self._core.leads)
        if due is not None:
            self._trusted(SecretNews(what=What.RESTORED, secret=due.secret, was=due.was))
            self._writer.write(acts.PutSecret(secret=due.secret, revision=due.revision))

    def _probe(self, peers: tuple[acts.RingPeer, ...]) -> None:
        # Rare, and over in two seconds. Should it fail, the core asks again after a while.
        threads.start(lambda: self.tell(probe(peers)), name="elastic3d-probe", edge=threads.Edge.ALONE)

    def _watch_roster(self, on: bool) -> None:
        if on is (self._roster is not None):
            return
        self._roster_watches += 1
        if self._roster is not None:
            self._roster.close(wait=False)
            self._roster = None
        else:
            self._roster = self._watch(keys.ROLL, e.Tier.ROSTER, self._roster_watches)

    # The watches' threads.

    def _watch(self, prefix: str, tier: e.Tier, number: int) -> Watch:
        listed = self._root + (keys.LISTED if tier is e.Tier.BOARD else prefix)
        reader = reading.Reader(self._root)
        return Watch(
            self._client, self._root + prefix, lambda news: self._watched(tier, number, reader, news), listed=listed
        )

    def _watched(self, tier: e.Tier, number: int, reader: reading.Reader, news: Delivery) -> None:
        def put(event: e.Event) -> None:
            self._inbox.put(_Heard(number, event))

        match news:
            case etcd_watch.Snapshot():
                items: list[e.OfRoster | e.OfBoard] = []
                if tier is e.Tier.BOARD:
                    stands = next((kv for kv in news.kvs if kv.key == self._root + keys.SECRET), None)
                    value, at = (None, 0) if stands is None else (stands.value, stands.mod_revision)
                    self._inbox.put(_SecretSeen(value=value, revision=at))
                for said in reader.listed(news.kvs):
                    if isinstance(said, e.Broken):
                        put(said)
                    else:
                        items.append(said)
                listing = e.Listed(
                    tier=tier, items=tuple(items), revision=news.revision, gap=news.gap, rolled_back=news.rolled_back
                )
                put(listing)
            case etcd_watch.Changes():
                for change in news.changes:
                    if change.key == self._root + keys.SECRET:
                        value = None if change.kv is None else change.kv.value
                        self._inbox.put(_SecretSeen(value=value, revision=change.revision))
                    try:
                        change_event = reader.changed(change.key, change.kv, change.revision)
                    except BaseUnknown as unknown:
                        raise etcd_watch.ListAgain from unknown
                    if change_event is not None:
                        put(change_event)
            case etcd_watch.Connected() if tier is e.Tier.BOARD:
                self._there, self._away = True, False
                self._writer.impaired("")
                self._heard(True)
                put(e.EtcdBack())
            case etcd_watch.Disconnected() if tier is e.Tier.BOARD and self._away:
                self._writer.impaired(news.reason)
            case etcd_watch.Disconnected() if tier is e.Tier.BOARD:
                self._there, self._away = False, True
                self._writer.away(news.reason)
                self._heard(False)
                put(e.EtcdLost(since=news.since, reason=news.reason))
            case etcd_watch.Ended():
                put(e.Broken(detail=str(news.error)))
            case _:
                pass
