"""Trying again, where that is safe.

Reads, listings, deletions and whole writes are simply repeated: the same bytes under the same name do no harm. A
conditional write is not: its answer may be what was lost, and the second try would fail against the first. What is
there is read back, and decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import tenacity

from checkpointing.errors import StoreError
from checkpointing.stores.protocol import Data, Entry, Store, Versioned

_T = TypeVar("_T")


def policy(
    *, tries: int = 5, first: float = 0.1, longest: float = 5.0, sleep: Callable[[float], None] = time.sleep
) -> tenacity.Retrying:
    """Return how transient errors are met: up to `tries` times, waiting up to `first` s, then twice that, and so on."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_attempt(tries),
        # The whole wait is random: hosts that lost the same server do not all come back at once.
        wait=tenacity.wait_random_exponential(multiplier=first, max=longest),
        sleep=sleep,
        reraise=True,
    )


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may do better in a moment."""
    return isinstance(error, StoreError) and error.transient


class RetryingStore:
    """A store whose passing failures are not seen."""

    def __init__(self, store: Store, retries: tenacity.Retrying | None = None) -> None:
        """Wrap `store`; `retries` is a policy that raises the last error again."""
        self._store = store
        self._retries = retries if retries is not None else policy()

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

        When an answer was lost, an object with the same bytes counts as the one created here.
        """
        lost: list[StoreError] = []

        def attempt() -> bool:
            try:
                if self._store.put_if_absent(name, data):
                    return True
            except StoreError as error:
                lost.append(error)
                found = self._store.read(name)
                if found is None:
                    raise
                return found.data == data
            if not lost:
                return False
            # An earlier try may have arrived late.
            found = self._store.read(name)
            return found is not None and found.data == data

        return self._again(attempt)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`; False if it is not.

        When an answer was lost and something else is there now, nobody can tell whether it came before or after this
        write, and the error is raised: read, and decide anew.
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
            found = self._store.read(name)
            if found is not None and found.data == data:
                return True
            if (found.token if found is not None else None) == expected:
                raise lost[-1]  # not done: it may be tried again
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
        return self._retries(attempt)


class _Undecided(Exception):
    """A swap whose outcome cannot be known."""
