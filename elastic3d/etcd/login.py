"""Our login at etcd: the token that calls carry, and the password that gets the next one.

The password is asked for each time: if it comes from a file, that file may be replaced while the job runs. Checking a
password is costly for etcd, so one that was refused is tried again only after a growing pause; another one at once.
Where many log in together checks take long, and one that nobody waits for any more is finished all the same: it counts
as a late answer, after which the session waits longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic3d.clock import Clock
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import failures, messages, transport
from elastic3d.etcd.failures import FailureKind
from elastic3d.etcd.transport import EndpointChannel, Metadata, RpcFailure

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    password: str
    failure: RpcFailure
    pause: float
    until: float


class Login:
    """The token of the user `name`. Thread-safe.

    password: returns the password. patience: returns the seconds for its check.
    """

    def __init__(self, name: str, password: Callable[[], str], patience: Callable[[], float], clock: Clock) -> None:
        self._name, self._password, self._patience, self._clock = name, password, patience, clock
        self._token: str | None = None
        self._refusal: _Refusal | None = None
        self._lock = threading.Lock()

    def forget(self) -> None:
        """Authenticate anew before the next call."""
        self._token = None

    def after_fork(self) -> None:
        """Begin anew, in the child of a fork."""
        self._token, self._lock = None, threading.Lock()

    def metadata(self, channel: EndpointChannel) -> Metadata:
        """Return what a call over `channel` carries; RpcFailure if no token can be had."""
        token = self._token
        if token is None:
            with self._lock:
                token = self._token
                if token is None:
                    self._token = token = self._authenticate(channel)
        return (("token", token),) if token else ()

    def _authenticate(self, channel: EndpointChannel) -> str:
        try:
            password = self._password()
        except ConfigurationError as error:
            raise RpcFailure("NOT_SENT", str(error)) from None
        refused = self._refusal
        if refused is not None and refused.password == password and self._clock.monotonic() < refused.until:
            raise refused.failure
        request = messages.new("AuthenticateRequest", name=self._name, password=password)
        try:
            answer = channel.call(transport.AUTHENTICATE, request, timeout=self._patience())
        except RpcFailure as failure:
            if "authentication is not enabled" in failure.detail:
                return ""  # as etcdctl does: credentials for a cluster that asks for none
            kind = failures.kind(failure)
            if kind is FailureKind.UNKNOWN:
                # The request that needed the token was not sent. The code stays: the session counts deadlines.
                detail = f"failed to connect to all addresses: {failure.detail}"
                raise RpcFailure(failure.code, detail) from None
            if kind is FailureKind.FINAL:
                pause = FIRST_PAUSE if refused is None else min(2 * refused.pause, LONGEST_PAUSE)
                until = self._clock.monotonic() + pause
                self._refusal = _Refusal(password=password, failure=failure, pause=pause, until=until)
            raise
        self._refusal = None
        return str(answer.token)
