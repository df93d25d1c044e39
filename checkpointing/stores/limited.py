"""Uploads that leave bandwidth to others.

A bucket of tokens, one per byte, fills at the allowed rate. Every upload takes what it needs before it sends; if none
are left it goes into debt and waits until the debt is paid. Several stores and threads may share a bucket, and with it
the rate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from checkpointing.stores.passing import PassingStore
from checkpointing.stores.protocol import Data, Store, chunks

_PIECES_PER_SECOND = 8  # how finely a large chunk is spread in time


class Bandwidth:
    """A rate in bytes per second, shared by all callers of `take`. Safe to use from several threads."""

    def __init__(
        self,
        rate: float,
        *,
        burst: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Allow `rate` bytes per second, and `burst` at once after a pause (default: those of an eighth of a second).

        ValueError unless both are positive.
        """
        burst = rate / _PIECES_PER_SECOND if burst is None else burst
        if not rate > 0 or not burst > 0:
            raise ValueError(f"a bandwidth is a positive number of bytes per second, not {rate!r}")
        self.rate = rate
        self._burst = burst
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._tokens, self._filled = burst, clock()

    @property
    def piece(self) -> int:
        """The number of bytes best taken at a time."""
        return max(1, int(self.rate / _PIECES_PER_SECOND))

    def take(self, amount: int) -> None:
        """Wait until `amount` bytes may be sent. Callers are served roughly in the order in which they came."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._filled) * self.rate) - amount
            self._filled = now
            debt = -self._tokens
        if debt > 0:
            self._sleep(debt / self.rate)


class LimitedStore(PassingStore):
    """A store whose uploads keep to a bandwidth. Reads, and the small writes that commit, do not wait."""

    def __init__(self, store: Store, bandwidth: Bandwidth) -> None:
        """Wrap `store`."""
        super().__init__(store)
        self._bandwidth = bandwidth

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, no faster than the bandwidth allows."""
        metered = _Metered(data, self._bandwidth)
        self._store.put(name, iter(metered) if isinstance(data, Iterator) else metered, check=check)


class _Metered:
    """Data that comes no faster than a bandwidth allows."""

    def __init__(self, data: Data, bandwidth: Bandwidth) -> None:
        self._data, self._bandwidth = data, bandwidth

    def __iter__(self) -> Iterator[memoryview]:
        size = self._bandwidth.piece
        for chunk in chunks(self._data):
            for offset in range(0, chunk.nbytes, size):
                piece = chunk[offset : offset + size]
                self._bandwidth.take(piece.nbytes)
                yield piece
