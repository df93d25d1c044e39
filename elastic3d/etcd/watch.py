"""A prefix as a snapshot and all its changes after it, whichever member serves it.

A watch on a stopped member is silent for ever, and gRPC's own keepalive does not notice. So we ask for progress once we
have heard nothing from the member for a while, consider one that gives no answer dead, and go on at the next one from
the revision after the last one seen: no change is lost, none comes twice. Answers to other calls and keepalives of this
session are signs of life too, which spares an idle process most of its traffic; only a connection that breaks alone is
noticed more slowly because of that. Progress answers never move that revision: before etcd 3.4.25 and 3.5.8 they may
overtake changes (etcd#15220). If etcd has compacted away what we have not seen, the prefix is listed again and
delivered as a snapshot that is marked as a gap. The same happens when etcd comes back with another history than the one
that was delivered, empty or from a backup; `history` finds that out whenever the watch is made anew.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from elastic3d import threads
from elastic3d.errors import EtcdError, EtcdUnavailable, UsageError
from elastic3d.etcd import failures, messages, transport
from elastic3d.etcd.breaker import ELECTION
from elastic3d.etcd.client import EtcdClient
from elastic3d.etcd.history import Change, DeliveredRevisions
from elastic3d.etcd.operations import KeyValue
from elastic3d.etcd.session import Session
from elastic3d.etcd.transport import RpcFailure

QUIET = 0.8
"""Seconds without an answer from the member, to anything in this session, until the watch asks it for progress."""

OWN_QUIET = 5.0
"""Seconds without an answer on the watch's own connection until it asks all the same."""

LISTING = 2.0
"""Most seconds a listing may take: closing waits for it."""

UNSERVED = 3.0
"""Seconds that finding another member may take before a Disconnected says that there is none."""

EXPLAIN = 5.0
"""Seconds between two attempts to find out what people have to mend."""

DELETE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys under the prefix, or the one listed in its place, at `revision`.

    gap: changes between the last delivery and this one are not known. rolled_back: etcd has lost changes that were
    delivered, and counts revisions anew from before them; always a gap.
    """

    kvs: tuple[KeyValue, ...]
    revision: int
    gap: bool
    rolled_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes up to `revision`, in order. Changes of one revision come together."""

    changes: tuple[Change, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Changes flow again, from `endpoint`. What happened meanwhile is delivered after this, not before."""

    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """No member serves us: none answers, or none has served for 3 s. since: monotonic time of the last answer of one.

    Delivered again, without a Connected between, when it turns out that somebody must mend what `reason` says. Moving
    from one member to the next without delay is not reported.
    """

    since: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The watch is over, for a reason that trying again does not help."""

    error: EtcdError


class ListAgain(Exception):
    """Raised by `deliver`: the changes do not fit what it knows, and the prefix has to be listed again."""


Delivery = Snapshot | Changes | Connected | Disconnected | Ended


class _Feed:
    """One watch stream: its answers go into `answers`, an RpcFailure last."""

    def __init__(self, session: Session, index: int, create: Any, answers: queue.SimpleQueue[Any]) -> None:
        # Before it is asked: the answer to the creation may be here at once.
        self.asked = session.clock.monotonic()
        self.heard = -math.inf
        self._index = index
        self._session = session
        self._answers = answers
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(messages.new("WatchRequest", create_request=create))
        self._stream = session.open(transport.WATCH, iter(self._requests.get, None), index)
        self._thread = threads.start(
            self._read, name="etcd-watch-answers", edge=threads.Edge.ALONE, failed=self._broken
        )

    @property
    def waiting(self) -> bool:
        """Whether there was no answer since the last question."""
        return self.heard < self.asked

    def ask_progress(self) -> None:
        self.asked = self._session.clock.monotonic()
        self._requests.put(messages.new("WatchRequest", progress_request=messages.new("WatchProgressRequest")))

    def close(self) -> None:
        self._requests.put(None)
        self._session.end(self._stream)
        self._thread.join()

    def _read(self) -> None:
        failure = RpcFailure("UNAVAILABLE", "the server ended the stream")
        try:
            for answer in self._stream:
                self._session.heard(self._index, self.asked if self.waiting else -math.inf)
                self.heard = self._session.heard_at(self._index)
                self._answers.put(answer)
        except RpcFailure as error:
            failure = error
        self._answers.put(failure)

    def _broken(self, error: BaseException) -> None:
        """End the stream: the watch goes on with another."""
        self._answers.put(RpcFailure("INTERNAL", f"an answer could not be taken: {error!r}"))


class Watch:
    """Deliver a snapshot of `prefix` and then all its changes to `deliver`, from now until `close`.

    `deliver` runs on the watch's own thread, one delivery at a time, in order; it may use the client, may take its
    time, and must not raise, except ListAgain for Changes: a Snapshot follows, marked as a gap. The first delivery is a
    Snapshot (or Disconnected, until there is one), the next Connected.

    listed: the prefix of a snapshot's keys, `prefix` by default, which has to begin with it: a snapshot may hold more
    than is watched, as of the same revision.
    """

    def __init__(
        self, client: EtcdClient, prefix: str, deliver: Callable[[Delivery], None], *, listed: str | None = None
    ) -> None:
        self._client = client
        self._listing = prefix if listed is None else listed
        self._session = client.session
        self._clock = client.session.clock
        self._prefix = prefix
        self._deliver = deliver
        self._closed = threading.Event()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._revision: int | None = None
        self._history = DeliveredRevisions(prefix)
        self._listed = self._rolled_back = False
        self._current = False
        self._connected: bool | None = None
        self._heard = self._clock.monotonic()
        self._failures = 0
        self._refusals = 0
        self._reason = ""
        self._explained_at = -math.inf
        self._electing: float | None = None
        self._pid = os.getpid()
        self._session.ensure_usable()
        self._session.attach(self)
        self._thread = threads.start(self._run, name="etcd-watch", edge=threads.Edge.ALONE, failed=self._broken)

    def close(self, *, wait: bool = True) -> None:
        """End the watch; nothing is delivered once this returns. May be called twice, and from a delivery.

        wait=False: return at once; a delivery under way may still come. In a forked child nothing happens: the watch is
        the parent's.
        """
        if os.getpid() != self._pid:
            return
        self._session.detach(self)
        self._closed.set()
        self._answers.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                index = self._session.order()[0]
                try:
                    if self._revision is None:
                        self._list()
                    else:
                        self._follow(index, self._revision)
                except RpcFailure as failure:
                    self._lost(index, failure)
                except EtcdUnavailable as error:
                    self._lost(None, RpcFailure("UNAVAILABLE", str(error)))
        except EtcdError as error:
            self._tell(Ended(error=error))
        except UsageError:
            if not self._session.closed:
                raise

    def _broken(self, error: BaseException) -> None:
        """Report that nothing will be delivered any more: a watch that is silent for ever must not look alive."""
        self._tell(Ended(error=EtcdError(f"the watch of {self._prefix} failed; start this node again: {error!r}")))

    def _tell(self, delivery: Delivery) -> None:
        if not self._closed.is_set():
            try:
                self._deliver(delivery)
            except ListAgain:
                self._revision = None

    def _list(self) -> None:
        codec = self._client.codec
        request = messages.new("RangeRequest", **codec.span(self._listing, prefix=True))
        answer = self._session.call(transport.RANGE, request, safe=True, budget=self._reading)
        kvs, cluster, revision = (
            tuple(map(codec.key_value, answer.kvs)),
            answer.header.cluster_id,
            answer.header.revision,
        )
        self._heard = self._clock.monotonic()
        rolled_back = self._rolled_back or self._history.contradicts(cluster, kvs, revision)
        self._history.listed(cluster, kvs, revision)
        self._revision, self._current, self._rolled_back = int(revision), True, False
        gap, self._listed = self._listed, True
        self._tell(Snapshot(kvs=kvs, revision=self._revision, gap=gap, rolled_back=rolled_back))

    @property
    def _reading(self) -> float:
        """Seconds for a read on this thread, at most."""
        return min(self._session.patience, LISTING)

    def _follow(self, index: int, revision: int) -> None:
        """Deliver changes after `revision` from endpoint `index` until it fails (RpcFailure) or there is a gap."""
        span = self._client.codec.span(self._prefix, prefix=True)
        create = messages.new("WatchCreateRequest", start_revision=revision + 1, **span)
        self._answers = queue.SimpleQueue()
        answers = self._answers
        if self._closed.is_set():
            return
        feed = _Feed(self._session, index, create, answers)
        try:
            listening = -math.inf
            while not self._closed.is_set():
                now = self._clock.monotonic()
                if feed.waiting:
                    # Silence counts only while we listened: a slow delivery is not the member's fault.
                    due = max(feed.asked, listening) + self._session.patience
                    if now >= due:
                        raise RpcFailure("DEADLINE_EXCEEDED", f"the watch was silent for {now - feed.asked:.1f} s")
                else:
                    due = min(feed.heard + OWN_QUIET, self._session.heard_at(index) + QUIET)
                    if now >= due:
                        feed.ask_progress()
                        continue
                try:
                    answer = answers.get(timeout=due - now)
                except queue.Empty:
                    continue
                if answer is None:
                    return
                if isinstance(answer, RpcFailure):
                    raise answer
                if self._take(index, answer):
                    listening = self._clock.monotonic()
                if self._revision is None:
                    return
        finally:
            self._current = False
            self._heard = max(self._heard, feed.heard, self._session.heard_at(index))
            feed.close()

    def _take(self, index: int, answer: Any) -> bool:
        """Deliver the changes of an answer; return whether anything was delivered."""
        if answer.canceled:
            if answer.compact_revision:
                self._revision = None
                return False
            self._refused(answer.cancel_reason)
        if answer.created:
            self._failures = self._refusals = 0
            self._electing = None
            self._session.succeeded(index)
            # A member that lags has a lower revision too: only a linearizable read tells the two apart.
            if not (self._current and self._history.continues(answer.header)) and not self._history.kept_by(
                self._session, self._client.codec, budget=self._reading
            ):
                self._revision, self._rolled_back = None, True
                return False
            if not self._connected:
                self._connected = True
                self._tell(Connected(endpoint=str(self._session.endpoints[index])))
                return True
        if not answer.events:
            return False
        changes = tuple(map(self._change, answer.events))
        self._history.changed(changes)
        self._revision = max(change.revision for change in changes)
        self._tell(Changes(changes=changes, revision=self._revision))
        return True

    def _refused(self, reason: str) -> NoReturn:
        if "permission denied" not in reason:
            raise RpcFailure("UNAVAILABLE", reason)
        self._refusals += 1
        if self._refusals > 1:
            raise failures.final(RpcFailure("PERMISSION_DENIED", reason))
        # etcd 3.5 refuses a watch with an outdated token in the same words: once more with a new one.
        raise RpcFailure("UNAUTHENTICATED", "etcdserver: invalid auth token")

    def _change(self, event: Any) -> Change:
        kv = self._client.codec.key_value(event.kv)
        return Change(key=kv.key, kv=None if event.type == DELETE else kv, revision=kv.mod_revision)

    def _lost(self, index: int | None, failure: RpcFailure) -> None:
        kind = self._session.kind(failure)
        if kind is failures.FailureKind.FINAL:
            raise failures.final(failure)
        if kind is failures.FailureKind.TOKEN:
            self._session.forget_token()
        elif index is not None:
            self._session.failed(index, failure)
        now = self._clock.monotonic()
        self._failures += 1
        if not failures.electing(failure):
            self._electing = None
        elif self._electing is None:
            self._electing = now
        # An outdated token and an election are over in a moment, or turn out to be something else.
        passing = kind is failures.FailureKind.TOKEN or (self._electing is not None and now < self._electing + ELECTION)
        # A read that timed out proves less than every member's refusal: an election may last that long.
        everyone = index is not None and self._failures >= len(self._session.endpoints) and not passing
        curable = self._session.curable(failure)
        gone = self._connected is not False and (everyone or now - self._heard >= UNSERVED)
        # What people have to mend shows only in the tries that follow, and takes time to find out.
        if gone or (self._connected is False and curable and now - self._explained_at >= EXPLAIN):
            self._explained_at = now if curable else -math.inf
            reason = failure.detail if index is None else self._session.reason(index, failure)
            if gone or reason != self._reason:
                self._connected, self._reason = False, reason
                self._tell(Disconnected(since=self._heard, reason=reason))
        self._closed.wait(self._session.pause(self._failures))
