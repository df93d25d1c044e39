"""Leases that are kept alive, and a clear report when one is lost.

One stream carries the keepalives of all leases. A lease counts as ours until `Lease.deadline` on the monotonic clock:
the time we *sent* the newest keepalive that was answered, plus its time to live, less a margin for clocks that run at
different rates. The server cannot have ended it before then, so the owner of something held by a lease gives it up in
time, without an answer from anybody. If the process itself was stopped past the deadline nothing can run in time: the
first thing that happens on waking is the loss, and a write under the dead lease fails with LeaseGone.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic3d import threads
from elastic3d.errors import UsageError
from elastic3d.etcd import failures, messages, transport
from elastic3d.etcd.client import EtcdClient
from elastic3d.etcd.session import Session
from elastic3d.etcd.transport import RpcFailure

# Fraction of the time to live: for a server's clock that runs faster than ours, and for the time to act on a loss.
MARGIN = 0.05
# Keepalives per time to live.
BEATS = 4.0


class LeaseLoss(StrEnum):
    """How a lease was lost."""

    EXPIRED = "expired"  # given up by our own clock: etcd did not answer in time, or we were stopped
    GONE = "gone"  # etcd says that it is over: revoked by somebody, or expired while etcd did not hear us


@dataclass(slots=True, eq=False)
class Lease:
    """A lease that its keeper keeps alive. Any thread may read it, only the keeper writes it."""

    id: int
    ttl: float  # seconds, as granted
    deadline: float  # monotonic seconds until which it is surely ours
    lost: LeaseLoss | None = None
    on_lost: Callable[[Lease, LeaseLoss], None] | None = field(default=None, repr=False)
    due: float = field(default=0.0, repr=False)  # when the next keepalive is to be sent
    unanswered: deque[float] = field(default_factory=deque, repr=False)  # when the unanswered ones were sent

    def held(self, now: float) -> bool:
        """Return whether it is surely still ours at monotonic time `now`."""
        return self.lost is None and now < self.deadline


class _Beats:
    """One keepalive stream: requests from a queue, answers passed to `heard` on its own thread, None at the end."""

    def __init__(self, session: Session, index: int, heard: Callable[[_Beats, Any], None]) -> None:
        self.index = index
        self.failure: RpcFailure | None = None
        self._session = session
        self._heard = heard
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stream = session.open(transport.LEASE_KEEP_ALIVE, iter(self._requests.get, None), index)
        self._thread = threads.start(
            self._read, name="etcd-lease-answers", edge=threads.Edge.ALONE, failed=self._broken
        )

    def send(self, lease: int) -> None:
        self._requests.put(messages.new("LeaseKeepAliveRequest", ID=lease))

    def close(self) -> None:
        self._requests.put(None)
        self._session.end(self._stream)
        self._thread.join()

    def _read(self) -> None:
        failure = RpcFailure("UNAVAILABLE", "the server ended the stream")
        try:
            for answer in self._stream:
                self._heard(self, answer)
        except RpcFailure as error:
            failure = error
        self.failure = failure
        self._heard(self, None)

    def _broken(self, error: BaseException) -> None:
        """End the stream: the keeper goes on with another."""
        self.failure = RpcFailure("INTERNAL", f"an answer could not be taken: {error!r}")
        self._heard(self, None)


class LeaseKeeper:
    """Keep leases of `client` alive until they are revoked or lost.

    Callbacks run on the keeper's own thread, one at a time; they may grant and revoke, must be quick (keepalives wait
    for them) and must not raise. `close`, or closing the client, leaves the leases to run out: revoke them first for a
    clean leave.
    """

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._session = client.session
        self._clock = client.session.clock
        self._changed = threading.Condition()
        self._leases: dict[int, Lease] = {}
        self._beats: _Beats | None = None
        self._failures = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._session.attach(self)

    def grant(
        self, ttl: float, on_lost: Callable[[Lease, LeaseLoss], None] | None = None, *, budget: float | None = None
    ) -> Lease:
        """Return a new lease, kept alive from now on. `on_lost` is called at most once, never after `revoke`.

        ttl: seconds; etcd raises values below its minimum, about 2 s: see `Lease.ttl`.
        """
        self._ensure_own()
        began = self._clock.monotonic()
        number, granted = self._client.grant(ttl, budget=budget)
        lease = Lease(id=number, ttl=granted, deadline=began + granted * (1 - MARGIN), on_lost=on_lost)
        with self._changed:
            if self._closed:
                raise UsageError("etcd: this lease keeper is closed; make a new one")
            lease.due = self._clock.monotonic()
            self._leases[number] = lease
            if self._thread is None:
                self._thread = threads.start(self._run, name="etcd-leases", edge=threads.Edge.AGAIN)
            self._changed.notify_all()
        return lease

    def revoke(self, lease: Lease, *, budget: float | None = None) -> None:
        """End a lease and delete its keys now. If etcd cannot be reached the lease runs out by itself."""
        self.forget(lease)
        self._client.revoke(lease.id, budget=budget)

    def forget(self, lease: Lease) -> None:
        """Stop keeping a lease alive: it runs out by itself, and its loss is not reported."""
        self._ensure_own()
        with self._changed:
            self._leases.pop(lease.id, None)

    def close(self) -> None:
        """Stop keeping; return when the threads have ended. May be called twice, and from a callback.

        In a forked child nothing happens: the leases are the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._session.detach(self)
        with self._changed:
            self._closed = True
            self._leases.clear()
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _ensure_own(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"etcd: this lease keeper belongs to process {self._pid}, from which this one was forked, and the "
                "leases are that process's to keep; make a new LeaseKeeper in the child"
            )

    def _run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except UsageError:
            if not self._session.closed:
                raise
        finally:
            self._replace(None)

    def _turn(self) -> None:
        with self._changed:
            now = self._clock.monotonic()
            lost = self._take_lost(now)
            failure = self._failure(now)
            if not lost and failure is None and (self._beats is not None or not self._leases):
                self._send_due(now)
                if not self._closed:
                    self._changed.wait(self._until_next(now))
                return
        for lease, loss in lost:
            if lease.on_lost is not None:
                lease.on_lost(lease, loss)
        if failure is not None:
            self._failed(failure)
        elif not lost:
            self._open()

    def _take_lost(self, now: float) -> list[tuple[Lease, LeaseLoss]]:
        lost = []
        for lease in list(self._leases.values()):
            if lease.lost is None and now >= lease.deadline:
                lease.lost = LeaseLoss.EXPIRED
            if lease.lost is not None:
                del self._leases[lease.id]
                lost.append((lease, lease.lost))
        return lost

    def _failure(self, now: float) -> RpcFailure | None:
        if self._beats is None:
            return None
        waiting = [lease.unanswered[0] for lease in self._leases.values() if lease.unanswered]
        if waiting and now - min(waiting) >= self._session.patience:
            return RpcFailure("DEADLINE_EXCEEDED", "no answer to a keepalive")
        return self._beats.failure

    def _send_due(self, now: float) -> None:
        for lease in self._leases.values():
            if now >= lease.due:
                assert self._beats is not None
                lease.due = now + lease.ttl / BEATS
                lease.unanswered.append(now)
                self._beats.send(lease.id)

    def _until_next(self, now: float) -> float | None:
        if not self._leases:
            return None
        times = [min(lease.due, lease.deadline) for lease in self._leases.values()]
        times += [lease.unanswered[0] + self._session.patience for lease in self._leases.values() if lease.unanswered]
        return max(0.0, min(times) - now)

    def _heard(self, beats: _Beats, answer: Any) -> None:
        with self._changed:
            if beats is not self._beats:
                return
            lease = None if answer is None else self._leases.get(answer.ID)
            sent = -math.inf
            if lease is not None and lease.unanswered:
                sent = lease.unanswered.popleft()
                if answer.TTL > 0:
                    # Counted from the sending: the server heard it later, so it ends the lease later.
                    lease.deadline = max(lease.deadline, sent + answer.TTL * (1 - MARGIN))
                else:
                    lease.lost = LeaseLoss.GONE
            if answer is None or (lease is not None and lease.lost is not None):
                self._changed.notify_all()
        if answer is None:
            return
        self._session.heard(beats.index, sent)
        if self._failures:
            self._failures = 0
            self._session.succeeded(beats.index)

    def _failed(self, failure: RpcFailure) -> None:
        beats = self._beats
        assert beats is not None
        self._replace(None)
        self._give_up_on(beats.index, failure)

    def _open(self) -> None:
        index = self._session.order()[0]
        try:
            beats = _Beats(self._session, index, self._heard)
        except RpcFailure as failure:
            self._give_up_on(index, failure)
        else:
            self._replace(beats)

    def _replace(self, beats: _Beats | None) -> None:
        with self._changed:
            old, self._beats = self._beats, beats
            now = self._clock.monotonic()
            for lease in self._leases.values():
                lease.unanswered.clear()
                lease.due = now
        if old is not None:
            old.close()  # outside the lock: its thread may be waiting for it

    def _give_up_on(self, index: int, failure: RpcFailure) -> None:
        if self._session.kind(failure) is failures.FailureKind.TOKEN:
            self._session.forget_token()
        else:
            self._session.failed(index, failure)
        self._failures += 1
        pause = self._session.pause(self._failures)
        with self._changed:
            if pause and not self._closed:
                deadlines = [lease.deadline for lease in self._leases.values()]
                now = self._clock.monotonic()
                self._changed.wait(max(0.0, min([now + pause, *deadlines]) - now))
