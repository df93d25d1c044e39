"""The thread of a member that writes to etcd, and the lease its keys stand under.

Writes go in order. Unfenced ones (the member's keys, a tomb, a doubt, the run's secret) are tried until etcd takes
them; fenced ones once, since only the core can say whether they still make sense: one without an answer counts as
failed, and the watch shows what became of it. The core hears at once what a write changed; the watch's echo comes later
and is recognised by its revision.

Between writes comes the pulse, and while this member leads, now and then, a compaction and the account of the run's
time. Since the pulse is conditional
on the member's own keys, it also finds out when somebody deleted them, or wrote over them.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from elastic3d import threads
from elastic3d.clock import Clock
from elastic3d.errors import EtcdError, EtcdUnavailable
from elastic3d.etcd import EtcdClient, Impaired, Lease, LeaseGone, LeaseKeeper
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership import transactions
from elastic3d.membership.driver.compaction import Compaction
from elastic3d.membership.driver.goodput import GoodputKeeping, GoodputWriter
from elastic3d.membership.records import Pulse
from elastic3d.values import Node

BUDGET = 2.0
"""Seconds for one try of a write, over all endpoints."""

RETRY = 0.2
"""Seconds between two tries of a write."""

FIRST_PULSE = 0.2
"""Fraction of a period within which the first pulse is sent, so that not all come at once."""

MEND = (
    "until etcd forgets the past its database grows with every pulse, and once it is full it takes no writes: let this "
    "user compact, or have etcd do it (--auto-compaction-retention=1h)"
)
"""What to do about an etcd that will not compact."""


class MemberWriter:
    """Writes for the member `me` of the job under `root`, its own keys under a lease of `ttl` seconds.

    `tell` is called with the results. `pulse` is asked for the next pulse's content and `period` for the seconds
    between two, `token` for the leader's token while this member leads, else 0: a leader compacts etcd when
    `compaction` says so, and writes what `goodput` has. All are called on the writer's thread and must not block.
    """

    def __init__(
        self,
        client: EtcdClient,
        root: str,
        me: Node,
        ttl: float,
        tell: Callable[[e.Event], None],
        pulse: Callable[[], Pulse],
        period: Callable[[], float],
        clock: Clock,
        *,
        token: Callable[[], int] = lambda: 0,
        compaction: Compaction | None = None,
        goodput: GoodputKeeping | None = None,
    ) -> None:
        self._token, self._compaction = token, compaction or Compaction()
        self._goodput = GoodputWriter(client, root, goodput) if goodput is not None else None
        self._client, self._root, self._me, self._ttl, self._clock = client, root, me, ttl, clock
        self._tell, self._pulse, self._period = tell, pulse, period
        self._leases = LeaseKeeper(client)
        self._lease: Lease | None = None
        self._writes: deque[acts.Write] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._registered = self._reported = 0
        self._impaired = self._last_reason = ""
        self._pulse_at: float | None = None
        self._uncompacted = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to write."""
        self._thread = threads.start(
            self._run, name="elastic3d-member-writes", edge=threads.Edge.ALONE, failed=self._broken
        )

    def write(self, action: acts.Write) -> None:
        """Queue this write behind all earlier ones; of two reports, or stalls, in a row only the newer is written."""
        with self._changed:
            if self._writes and acts.replaces(action, self._writes[-1]):
                self._writes.pop()
            self._writes.append(action)
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, at most `seconds`."""
        end = self._clock.monotonic() + seconds
        with self._changed:
            while self._writes and (left := end - self._clock.monotonic()) > 0:
                self._changed.wait(timeout=left)

    def let_go(self) -> None:
        """Let this member's lease run out; the next write of its own keys gets another."""
        with self._changed:
            lease, self._lease = self._lease, None
            self._registered, self._reported, self._pulse_at = 0, 0, None
        if lease is not None:
            self._leases.forget(lease)

    def stop(self) -> None:
        """Write nothing more, and keep the lease alive no longer, as if the process had ended. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * BUDGET)
        self._leases.close()

    def close(self) -> None:
        """Stop, and give the lease back, so that nothing of this member stays in etcd."""
        self.stop()
        if self._goodput is not None and not self._impaired and self._lease is not None:
            self._goodput.look(self._token(), last=True)
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._client.revoke(lease.id, budget=1.0)
            except EtcdError:
                pass  # it runs out by itself

    # The writer's thread.

    def _broken(self, error: BaseException) -> None:
        """Have the member leave: what it decides would never be written."""
        self._tell(e.Broken(detail=f"the writes to etcd failed: {type(error).__name__}: {error}"))

    def _run(self) -> None:
        while True:
            action = self._next()
            if self._closed and action is None:
                return
            if action is None:
                self._beat()
                continue
            done = self._write(action)
            with self._changed:
                if done and self._writes and self._writes[0] is action:
                    self._writes.popleft()
                    self._changed.notify_all()
                elif self._closed:
                    return
                elif not done:
                    self._changed.wait(timeout=RETRY)

    def _next(self) -> acts.Write | None:
        """Return the next write; None when it is time for a pulse, or to end."""
        with self._changed:
            while not self._writes and not self._closed:
                now = self._clock.monotonic()
                if self._pulse_at is not None and now >= self._pulse_at:
                    return None
                self._changed.wait(timeout=None if self._pulse_at is None else self._pulse_at - now)
            return self._writes[0] if self._writes else None

    def _write(self, action: acts.Write) -> bool:
        """Return whether this write needs no further try."""
        fenced = isinstance(action, acts.Fenced)
        try:
            ok = self._send(action)
            self.impaired("")
        except LeaseGone:
            self._lost(self._lease)
            return False
        except EtcdError as error:
            if isinstance(error, Impaired):
                self.impaired(str(error))
            if not fenced:
                # Waiting helps if etcd is away, not if it refuses.
                if isinstance(error, EtcdUnavailable) or self._closed:
                    return False
                self._tell(e.Broken(detail=str(error)))
                return True
            ok = False
        if fenced or isinstance(action, acts.Bury | acts.PutDoubt):
            self._tell(e.WriteDone(write=action, ok=ok))
        return True

    def impaired(self, reason: str) -> None:
        """Report what people have to mend, once, and "" when they have. May be called from any thread."""
        with self._changed:
            known, self._impaired = self._impaired, reason
            last, self._last_reason = self._last_reason, reason
        if reason != known or (reason and reason != last):
            self._tell(e.EtcdImpaired(reason=reason))

    def away(self, reason: str) -> None:
        """Take note that people were told `reason` meanwhile: what they have to mend is reported again after it."""
        with self._changed:
            self._last_reason = reason

    def _send(self, action: acts.Write) -> bool:
        lease = 0
        stamped = self._stamped(action)
        ttl = transactions.lease_of(action, self._ttl)
        if transactions.own_lease(action):
            lease = self._own_lease()
        elif ttl is not None:
            lease, _granted = self._client.grant(ttl, budget=BUDGET)
        made = transactions.transaction(self._root, self._me, stamped, lease)
        idempotent = not isinstance(action, acts.Fenced)
        result = self._client.txn(made.conditions, made.operations, idempotent=idempotent, budget=BUDGET)
        if result.succeeded:
            self._succeeded(action, result.revision, lease)
        elif lease and not transactions.own_lease(action):
            self._client.revoke(lease, budget=BUDGET)
        return result.succeeded

    def _succeeded(self, action: acts.Write, revision: int, lease: int) -> None:
        """Report what a write changed, unless the end of its lease was reported already."""
        with self._changed:
            if transactions.own_lease(action) and (self._lease is None or self._lease.id != lease):
                return
            if isinstance(action, acts.PutMember):
                self._begin_pulses(revision)
            elif isinstance(action, acts.PutReport):
                self._reported = revision
            for event in transactions.events_of(self._me, action, revision):
                self._tell(event)

    def _own_lease(self) -> int:
        if self._lease is None or self._lease.lost is not None:
            self._lease = self._leases.grant(self._ttl, lambda lease, loss: self._lost(lease), budget=BUDGET)
        return self._lease.id

    def _lost(self, lease: Lease | None) -> None:
        """Take note, once, that this member's lease is over; called from the lease keeper's thread too."""
        with self._changed:
            if lease is None or lease is not self._lease or self._closed:
                return
            self._lease, self._registered, self._reported, self._pulse_at = None, 0, 0, None
        self._tell(e.Unregistered())

    def _stamped(self, action: acts.Write) -> acts.Write:
        """Return the write with what the core cannot know: the wall time, the term of etcd's leader."""
        match action:
            case acts.Seal():
                return replace(action, history=replace(action.history, at=self._clock.wall()))
            case acts.PutEnd():
                return replace(action, term=self._client.term(self._root, budget=BUDGET))
            case _:
                return action

    # The pulse.

    def _begin_pulses(self, registered: int) -> None:
        spread = zlib.crc32(self._me.id.encode(errors="surrogatepass")) / 2**32
        self._registered = registered
        if self._pulse_at is None:
            self._pulse_at = self._clock.monotonic() + FIRST_PULSE * spread * self._period()

    def _beat(self) -> None:
        with self._changed:
            lease, period = self._lease, self._period()
            registered, reported = self._registered, self._reported
            self._pulse_at = self._clock.monotonic() + period
        if lease is None:
            return
        pulse = replace(self._pulse(), every=period)
        made = transactions.pulse(self._root, self._me, pulse, registered, reported, lease.id)
        try:
            result = self._client.txn(made.conditions, made.operations, idempotent=True, budget=BUDGET)
            there = result.succeeded
        except LeaseGone:
            self._lost(lease)
            return
        except EtcdError as error:
            if isinstance(error, Impaired):
                self.impaired(str(error))
            return  # the watch reports it
        self.impaired("")
        self._compact(result.revision)
        if self._goodput is not None:
            self._goodput.look(self._token())
        if not there:
            with self._changed:
                self._registered, self._reported, self._pulse_at = 0, 0, None
            self._tell(e.Unregistered())

    def _compact(self, revision: int) -> None:
        now = self._clock.monotonic()
        self._compaction.saw(revision, now)
        past = self._compaction.due(now) if self._token() else 0
        if not past:
            return
        refused = ""
        try:
            self._client.compact(past)
        except EtcdUnavailable:
            return  # the next one covers this one
        except EtcdError as error:
            refused = f"{error}; {MEND}"
        if bool(refused) is not self._uncompacted:
            self._uncompacted = bool(refused)
            self._tell(e.CompactionRefused(reason=refused))
