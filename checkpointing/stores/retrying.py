"""Retries operations where that is safe.

Reads, listings, deletions and whole writes are simply repeated: the same bytes under the same name do no harm. A
conditional write is not: only its answer may have been lost, and the second try would fail against the first. The
object is read back instead, which decides.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import tenacity
from tenacity.wait import wait_base

from checkpointing.errors import Miswritten, StoreError, StoreUnreachable
from checkpointing.stores.protocol import Data, Entry, Store, Versioned, decides_creations

_T = TypeVar("_T")

PATIENCE = 120.0
"""Seconds of retries: busy object stores recover within seconds, and restart within a minute."""
FIRST_CONTACT = 10.0
"""Seconds for a place that has never answered: its address is probably wrong."""

_WRITES = 5
_FIRST = 0.1
_LONGEST = 10.0
_REPORT_AFTER = 5.0
_TOLD_EVERY = 30.0
_WAITS = random.SystemRandom()  # nobody's: samples may be made by what the global generator draws next


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """An operation that is being retried. seconds: since the first try."""

    error: str
    tries: int
    seconds: float


def policy(
    patience: Callable[[], float],
    *,
    first: float = _FIRST,
    longest: float = _LONGEST,
    sleep: Callable[[float], None] = time.sleep,
    before_sleep: Callable[[tenacity.RetryCallState], None] | None = None,
) -> tenacity.Retrying:
    """Return the policy that retries transient errors for `patience` seconds, with a last try at their end.

    Waits are random, up to `first` seconds, then twice that, and so on up to `longest`. before_sleep: called before
    each.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=lambda state: spent(state) >= patience() or _changes_again(state),
        wait=_Wait(patience, first, longest),
        sleep=sleep,
        before_sleep=before_sleep,
        reraise=True,
    )


def _changes_again(state: tenacity.RetryCallState) -> bool:
    """Return whether bytes change on the way every time: that does not pass, and each try sends all of them."""
    failed = state.outcome is not None and isinstance(state.outcome.exception(), Miswritten)
    return failed and state.attempt_number >= _WRITES


def spent(state: tenacity.RetryCallState) -> float:
    """Return the seconds since the first try, or those spent waiting if the clock does not show them."""
    return max(state.seconds_since_start or 0.0, state.idle_for)


class _Wait(wait_base):
    """A random wait up to a bound that doubles, so that hosts that lost a server do not all come back at once."""

    def __init__(self, patience: Callable[[], float], first: float, longest: float) -> None:
        self._patience, self._first, self._longest = patience, first, longest

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        # The power is limited, or a float would overflow.
        bound = min(self._longest, self._first * 2.0 ** min(retry_state.attempt_number - 1, 40))
        return min(_WAITS.uniform(0.0, bound), max(0.0, self._patience() - spent(retry_state)))


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed in a moment."""
    return isinstance(error, StoreError) and error.transient


class RetryingStore:
    """A store that hides the transient failures of another."""

    def __init__(
        self,
        store: Store,
        patience: float = PATIENCE,
        *,
        on_trouble: Callable[[Trouble], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wrap `store`. Each operation is tried for `patience` seconds. on_trouble: called every half minute."""
        self._store = store
        self.decides_creations = decides_creations(store)
        self._patience = patience
        self._on_trouble, self._sleep = on_trouble, sleep
        self._answered = False
        self._quiet_until = 0.0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The place, for messages."""
        return self._store.url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        return self._again(lambda: self._store.get(name, start, stop))

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        return self._again(lambda: self._store.read(name))

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return self._again(lambda: self._store.size(name))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object; data that can be iterated only once is sent only once."""
        if isinstance(data, Iterator):
            self._store.put(name, data, check=check)
        else:
            self._again(lambda: self._store.put(name, data, check=check))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there.

        If an answer was lost, an object with the same bytes counts as the one created here.
        """
        lost: list[StoreError] = []

        def attempt() -> bool:
            try:
                if self._store.put_if_absent(name, data):
                    return True
            except StoreError as error:
                lost.append(error)
                versioned = self._store.read(name)
                if versioned is None:
                    raise
                return versioned.data == data
            if not lost:
                return False
            # An earlier try may have arrived late.
            versioned = self._store.read(name)
            return versioned is not None and versioned.data == data

        return self._again(attempt)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`; False if it is not.

        If an answer was lost and another object is there now, it is unknown whether it came before or after this write,
        and the error is raised: read, and decide anew.
        """
        lost: list[StoreError] = []

        def attempt() -> bool:
            try:
                if self._store.compare_and_swap(name, expected, data):
                    return True
                if not lost:
                    return False
            except StoreError as error:
                lost.append(error)
            versioned = self._store.read(name)
            if versioned is not None and versioned.data == data:
                return True
            if (versioned.token if versioned is not None else None) == expected:
                raise lost[-1]  # not done, so that it may be tried again
            raise _Undecided from lost[-1]

        try:
            return self._again(attempt)
        except _Undecided:
            raise StoreError(
                f"store {self.url}: the answer to a swap of {name} was lost, and it has changed since; whether the "
                "swap was done is unknown. Read it and decide anew."
            ) from lost[-1]

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        yield from self._again(lambda: list(self._store.list(prefix)))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        yield from self._again(lambda: list(self._store.entries(prefix)))

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        self._again(lambda: self._store.delete(name))

    def _again(self, attempt: Callable[[], _T]) -> _T:
        def heard() -> _T:
            try:
                result = attempt()
            except StoreError as error:
                self._answered = self._answered or not isinstance(error, StoreUnreachable)
                raise
            self._answered = True
            return result

        return policy(self._limit, sleep=self._sleep, before_sleep=self._report)(heard)

    def _limit(self) -> float:
        return self._patience if self._answered else min(self._patience, FIRST_CONTACT)

    def _report(self, state: tenacity.RetryCallState) -> None:
        seconds = spent(state)
        if self._on_trouble is None or seconds < _REPORT_AFTER or state.outcome is None:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._quiet_until:
                return
            self._quiet_until = now + _TOLD_EVERY
        self._on_trouble(Trouble(error=str(state.outcome.exception()), tries=state.attempt_number, seconds=seconds))


class _Undecided(Exception):
    """A swap whose outcome cannot be known."""
