"""A conversation with one etcd cluster through whichever member answers.

Owns the channels, the breaker that orders them, and the rules for sending again. A call is a sequence of rounds: in
each round every endpoint is tried once, best first; between rounds there is a growing random wait; all within one
budget. `failures` decides what may be sent again: a request that can have been applied is surfaced as OutcomeUnknown,
unless the caller says that applying it twice is the same as once.

If a try times out and no other member is known to work, tries get twice as long each time, until answers come promptly
again. Without that a thousand clients of an etcd that is slow for a moment, each of them dialling anew every second,
would keep it slow for good.

A refused password is a final error at first. Once etcd has let us in, it means that somebody changed the password: then
etcd counts as away, until the new one is where we read the password.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import tenacity

from elastic3d.clock import Clock
from elastic3d.errors import ConfigurationError, EtcdUnavailable, UsageError
from elastic3d.etcd import diagnosis, failures, transport
from elastic3d.etcd.breaker import Breaker
from elastic3d.etcd.endpoints import Endpoint
from elastic3d.etcd.failures import FailureKind, Impaired, OutcomeUnknown
from elastic3d.etcd.login import Login
from elastic3d.etcd.tls import Tls
from elastic3d.etcd.transport import EndpointChannel, Method, RpcFailure, RpcStream

# Consecutive deadlines on one connection before it is thrown away: after a partition a fresh one is up at once, while
# TCP would send again only after a minute.
STALE_AFTER = 2
# Most seconds between rounds.
LONGEST_WAIT = 0.5
# How many times longer a try may become.
LONGEST_PATIENCE = 8.0


class Closable(Protocol):
    """Something with threads of its own that ends with the session."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """How a cluster has answered a session: so many times, in so many seconds altogether, and `failed` times not."""

    count: int = 0
    seconds: float = 0.0
    failed: int = 0


class _NoAnswer(EtcdUnavailable):
    """A round in which nobody answered, `index` last."""

    def __init__(self, index: int, failure: RpcFailure) -> None:
        super().__init__(str(failure))
        self.index, self.failure = index, failure


class Session:
    """See the module. Thread-safe. In a forked child it begins anew, without connections, streams and parts."""

    def __init__(
        self,
        endpoints: tuple[Endpoint, ...],
        *,
        user: str | None,
        password: str | Callable[[], str] | None,
        tls: Tls | None,
        timeout: float,
        budget: float,
        clock: Clock,
    ) -> None:
        if (user is None) != (password is None):
            raise ConfigurationError("etcd: user and password go together; give both or neither")
        self.endpoints = endpoints
        self.timeout = timeout
        self.budget = budget
        self.clock = clock
        self._tls = tls
        self._closed = False
        self._begin()
        self._deadlines = [0] * len(endpoints)
        self._heard_at = [-math.inf] * len(endpoints)
        self.answers = Answers()
        self._slowness = 1.0
        self._slowed_at = -math.inf
        self._login: Login | None = None
        if user is not None and password is not None:
            text = password
            self._login = Login(user, text if callable(text) else lambda: text, lambda: self.patience, clock)
        self._let_in = False
        _sessions.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        # Clients spread over the members at random, here by their process ids.
        self._breaker = Breaker(len(self.endpoints), preferred=os.getpid() % len(self.endpoints))
        self._channels: dict[int, EndpointChannel] = {}
        self._streams: set[RpcStream] = set()
        self._attached: list[Closable] = []

    def after_fork(self) -> None:
        """Begin anew in the child. Whatever the parent's threads use, and may have locked, is left as it is."""
        transport.leak((self._lock, self._channels, self._streams, self._attached))
        self._begin()
        if self._login is not None:
            self._login.after_fork()

    def ensure_usable(self) -> None:
        """Raise UsageError after close."""
        if self._closed:
            raise UsageError("etcd: this client is closed; make a new EtcdClient")

    def call(self, method: Method, request: Any, *, safe: bool, budget: float | None = None) -> Any:
        """Return the answer to `request`.

        safe: applying it twice is the same as applying it once. budget: seconds for all tries, the session's by
        default; a login that has begun is not cut short by it. EtcdUnavailable (OutcomeUnknown if an unsafe request may
        be applied), or the error of `failures.final`.
        """
        self.ensure_usable()
        deadline = self.clock.monotonic() + (self.budget if budget is None else budget)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_send_again),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=LONGEST_WAIT),
            # No round begins that would have no time left after its wait.
            stop=lambda state: self.clock.monotonic() + LONGEST_WAIT >= deadline,
            sleep=self.clock.sleep,
            reraise=True,
        )
        try:
            return retrying(self._round, method, request, safe, deadline)
        except _NoAnswer as error:
            everyone = ", ".join(map(str, self.endpoints))
            reason = self.reason(error.index, error.failure)
            raise EtcdUnavailable(
                f"etcd: no answer from {everyone} (last, {self.endpoints[error.index]}: {reason}); "
                "trying again may help: see that etcd runs, has a leader, and that the endpoints are right"
            ) from error

    def kind(self, failure: RpcFailure) -> FailureKind:
        """Return what to do about `failure`, like `failures.kind`, but knowing whether we were let in before."""
        kind = failures.kind(failure)
        if kind is FailureKind.TOKEN and self._login is None:
            kind = FailureKind.FINAL
        return FailureKind.LATER if kind is FailureKind.FINAL and self._let_in and failures.about_us(failure) else kind

    def curable(self, failure: RpcFailure) -> bool:
        """Return whether somebody must mend something before trying again helps: a password, a certificate."""
        handshake = any(text in failure.detail for text in diagnosis.HANDSHAKE)
        return handshake or self.kind(failure) is FailureKind.LATER

    def reason(self, index: int, failure: RpcFailure) -> str:
        """Return, for people, why endpoint `index` did not answer; may ask it, for a second or two."""
        if self.kind(failure) is FailureKind.LATER:
            return str(failures.later(failure))
        if not any(text in failure.detail for text in diagnosis.HANDSHAKE):
            return _short(failure)
        expired = "" if self._tls is None else self._tls.expired(self.clock.wall())
        said = expired or diagnosis.handshake(self.endpoints[index], self._tls, self.timeout)
        return f"TLS handshake failed: {said}" if said else _short(failure)

    def open(self, method: Method, requests: Iterable[Any], index: int, *, limit: float | None = None) -> RpcStream:
        """Open a stream to endpoint `index` over its own connection; RpcFailure if no token can be had.

        limit: seconds that it may take in all. A snapshot is also given by a member without a leader.
        """
        self.ensure_usable()
        leader = () if method is transport.SNAPSHOT else transport.HAS_LEADER
        metadata = leader + self._token(self._channel(index))
        channel = EndpointChannel(self.endpoints[index], self._tls)
        stream = channel.stream(method, requests, metadata=metadata, limit=limit)
        with self._lock:
            closed = self._closed
            self._streams.add(stream)
        if closed:
            self.end(stream)
        return stream

    def end(self, stream: RpcStream) -> None:
        """Close a stream that `open` returned."""
        with self._lock:
            self._streams.discard(stream)
        stream.close()

    def order(self) -> list[int]:
        """Return the endpoints' numbers, best first."""
        with self._lock:
            return self._breaker.order(self.clock.monotonic())

    @property
    def patience(self) -> float:
        """Seconds for one try at one member, at present."""
        return self.timeout * self._slowness

    def succeeded(self, index: int) -> None:
        """Take note that endpoint `index` answered."""
        with self._lock:
            self._breaker.succeeded(index)
            self._deadlines[index] = 0

    def heard(self, index: int, asked: float = -math.inf) -> None:
        """Take note that endpoint `index` is alive, whatever else is wrong, and answered what was asked at `asked`."""
        with self._lock:
            self._heard_at[index] = now = self.clock.monotonic()
            if asked > -math.inf:
                before = self.answers
                self.answers = replace(before, count=before.count + 1, seconds=before.seconds + now - asked)
            if now - asked < self.patience / 4:
                self._slowness = max(1.0, self._slowness / 2)

    def heard_at(self, index: int) -> float:
        """Return the monotonic time of the newest sign of life of endpoint `index`; -inf if there was none."""
        return self._heard_at[index]

    def failed(self, index: int, failure: RpcFailure | None = None) -> None:
        """Take note that endpoint `index` did not answer."""
        stale = None
        with self._lock:
            channel = self._channels.get(index)
        outdated = failure is not None and channel is not None and channel.outdated()
        with self._lock:
            self.answers = replace(self.answers, failed=self.answers.failed + 1)
            if outdated and self._channels.get(index) is channel:
                stale = self._channels.pop(index)
            now = self.clock.monotonic()
            self._breaker.failed(index, now, electing=failure is not None and failures.electing(failure))
            if failure is not None and failure.code == "DEADLINE_EXCEEDED":
                # Several threads that waited for the same slow member count once.
                if self._breaker.alone(index) and now - self._slowed_at >= self.patience:
                    self._slowed_at = now
                    self._slowness = min(2 * self._slowness, LONGEST_PATIENCE)
                self._deadlines[index] += 1
                if self._deadlines[index] >= STALE_AFTER:
                    self._deadlines[index] = 0
                    stale = self._channels.pop(index, None)
        if stale is not None:
            stale.close()

    def forget_token(self) -> None:
        """Authenticate anew before the next call."""
        if self._login is not None:
            self._login.forget()

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after this many failed streams in a row: none until every member was tried."""
        rounds, rest = divmod(failures, len(self.endpoints))
        return 0.0 if rest else min(0.05 * 2 ** min(rounds, 8), LONGEST_WAIT)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def attach(self, part: Closable) -> None:
        """Close `part` when this closes."""
        with self._lock:
            self._attached.append(part)

    def detach(self, part: Closable) -> None:
        """Forget a part that was closed separately."""
        with self._lock:
            if part in self._attached:
                self._attached.remove(part)

    def close(self) -> None:
        """End all streams, connections and attached parts of this process. May be called twice."""
        with self._lock:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
            streams, self._streams = list(self._streams), set()
            attached, self._attached = self._attached, []
        for stream in streams:
            stream.close()
        for channel in channels:
            channel.close()
        for part in attached:
            part.close()

    def _channel(self, index: int) -> EndpointChannel:
        with self._lock:
            if self._closed:
                raise UsageError("etcd: this client is closed; make a new EtcdClient")
            if index not in self._channels:
                self._channels[index] = EndpointChannel(self.endpoints[index], self._tls)
            return self._channels[index]

    def _round(self, method: Method, request: Any, safe: bool, deadline: float) -> Any:
        last = RpcFailure("DEADLINE_EXCEEDED", "no time left")
        index = 0
        renewed = False
        tries = self.order()
        while tries:
            index = tries.pop(0)
            began = self.clock.monotonic()
            timeout = min(self.patience, deadline - began)
            if timeout <= 0:
                break
            try:
                answer = self._once(index, method, request, timeout)
            except RpcFailure as failure:
                last = failure
            else:
                self.heard(index, began)
                self.succeeded(index)
                return answer
            kind = self.kind(last)
            if kind is FailureKind.LATER:
                raise failures.later(last)
            if kind is FailureKind.FINAL or (kind is FailureKind.TOKEN and renewed):
                raise failures.final(last)
            if kind is FailureKind.TOKEN:
                renewed = True
                self.forget_token()
                tries.insert(0, index)
                continue
            self.failed(index, last)
            self.ensure_usable()
            if kind is FailureKind.UNKNOWN and not safe:
                raise OutcomeUnknown(
                    f"etcd: {self.endpoints[index]} gave no answer ({_short(last)}); the write may or may not be "
                    "applied: read it back before trying again"
                )
        raise _NoAnswer(index, last)

    def _once(self, index: int, method: Method, request: Any, timeout: float) -> Any:
        channel = self._channel(index)
        if method in (transport.STATUS, transport.AUTHENTICATE):
            return channel.call(method, request, timeout=timeout)
        # Which members there are is also known to one without a leader.
        leader = () if method is transport.MEMBER_LIST else transport.HAS_LEADER
        metadata = leader + self._token(channel)
        answer = channel.call(method, request, timeout=timeout, metadata=metadata)
        self._let_in = True
        return answer

    def _token(self, channel: EndpointChannel) -> transport.Metadata:
        return () if self._login is None else self._login.metadata(channel)


def _may_send_again(error: BaseException) -> bool:
    return isinstance(error, EtcdUnavailable) and not isinstance(error, OutcomeUnknown | Impaired)


def _short(failure: RpcFailure) -> str:
    if failure.code == "DEADLINE_EXCEEDED":
        return "no answer in time"
    return failure.detail.splitlines()[0][:200] if failure.detail else failure.code


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in _sessions:
        session.after_fork()


os.register_at_fork(after_in_child=_after_fork)
