"""Starts a second try beside one that takes too long.

Object stores answer most requests in their usual time and a few far later. When a read, or the upload of a pack, has
taken several times as long as similar ones took lately, it is sent again, and the first good answer counts. Among
writes that is safe only for whole ones of the same bytes: conditional writes are never sent twice, nor is data that can
be read only once. (Dean and Barroso, The Tail at Scale, 2013.)
"""

from __future__ import annotations

import collections
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from checkpointing.stores.passing import PassingStore
from checkpointing.stores.protocol import Data, Store

_T = TypeVar("_T")

_KEPT = 64  # durations remembered of each kind
_NEEDED = 8  # before any request counts as slow
_BYTES = 1 << 20  # cost of a request besides its bytes, in bytes


class HedgedStore(PassingStore):
    """A store that starts a second try of a slow read or upload, and takes the first answer."""

    def __init__(
        self,
        store: Store,
        *,
        factor: float = 4.0,
        patience: float = 0.2,
        threads: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap `store`: try again after `factor` times the median, but not before `patience` seconds."""
        super().__init__(store)
        self._factor, self._patience, self._clock = factor, patience, clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="hedged")
        self._lock = threading.Lock()
        self._durations: dict[str, collections.deque[float]] = {
            kind: collections.deque(maxlen=_KEPT) for kind in ("get", "put")
        }
        self.hedges = 0

    def close(self) -> None:
        """Release the threads; a slower try may still run until its answer comes."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        size = 0 if stop is None else max(0, stop - start)
        return self._race("get", size, lambda: self._store.get(name, start, stop))

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object; a second upload of the same bytes may follow a slow one, and does no harm."""
        if isinstance(data, bytes | memoryview):
            size = memoryview(data).nbytes
        elif isinstance(data, list | tuple):
            size = sum(memoryview(chunk).nbytes for chunk in data)
        else:
            self._store.put(name, data, check=check)
            return
        self._race("put", size, lambda: self._store.put(name, data, check=check))

    def _race(self, kind: str, size: int, attempt: Callable[[], _T]) -> _T:
        began = self._clock()
        tries: list[Future[_T]] = [self._pool.submit(attempt)]
        wait(tries, timeout=self._slow(kind, size))
        if not tries[0].done():
            self.hedges += 1
            tries.append(self._pool.submit(attempt))
        pending = set(tries)
        while True:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            good = next((future for future in done if future.exception() is None), None)
            if good is not None:
                with self._lock:
                    self._durations[kind].append((self._clock() - began) / (_BYTES + size))
                return good.result()
            if not pending:
                return tries[0].result()  # both failed: raise the first one's error

    def _slow(self, kind: str, size: int) -> float | None:
        """Return the seconds after which a request of `size` bytes is slow; None while too few durations are known."""
        with self._lock:
            known = list(self._durations[kind])
        if len(known) < _NEEDED:
            return None
        return max(self._patience, self._factor * statistics.median(known) * (_BYTES + size))
