"""A limit in bytes per second that several transfers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

_SLICE = 256 << 10
_BURST = 0.25  # seconds' worth of bytes that may go at once after a pause


class Bucket:
    """Tokens that come at `rate` bytes per second; whoever takes bytes waits until they are due."""

    def __init__(self, rate: float, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._due = clock()

    def take(self, nbytes: int) -> None:
        """Return when `nbytes` may be sent."""
        with self._lock:
            now = self._clock()
            due = max(self._due, now - _BURST)
            self._due = due + nbytes / self._rate
        if due > now:
            self._sleep(due - now)


class Paced:
    """Chunks that come no faster than a bucket lets them; they can be iterated again, for a second try."""

    __slots__ = ("_bucket", "_chunks")

    def __init__(self, chunks: Sequence[bytes | memoryview], bucket: Bucket) -> None:
        self._chunks = chunks
        self._bucket = bucket

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in self._chunks:
            view = memoryview(chunk)
            for start in range(0, view.nbytes, _SLICE):
                part = view[start : start + _SLICE]
                self._bucket.take(part.nbytes)
                yield part
