"""Load the next step in a thread while the present one trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

from elastic3d import threads

T = TypeVar("T")

PATIENCE = 5.0


class _End:
    pass


class Ahead(Generic[T]):
    """An iterator whose next item is made in a thread once the one before was taken: at most one waits.

    An exception in making an item is raised where that item is asked for. `close` stops the thread; one that is not
    over with its item after `PATIENCE` seconds is left behind, as a daemon that ends with the process. Whoever then
    reads from where it does has to `wait` for it.
    """

    def __init__(self, items: Iterator[T], finish: Callable[[T], T]) -> None:
        self._items, self._finish = items, finish
        self._made: SimpleQueue[T | BaseException | _End] = SimpleQueue()
        self._free = threading.Semaphore(1)
        self._stopped = threading.Event()
        self._thread = threads.start(self._work, name="elastic3d-samples", edge=threads.Edge.ALONE)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item, or raise the exception of making it."""
        item = self._made.get()
        if isinstance(item, _End):
            self._made.put(item)
            raise StopIteration
        if isinstance(item, BaseException):
            self._made.put(_End())
            raise item
        self._free.release()
        return item

    def close(self) -> None:
        """Stop the thread once it has finished its present item."""
        self._stopped.set()
        self._free.release()
        self._thread.join(PATIENCE)

    def wait(self) -> None:
        """Return once the thread has ended, however long that takes. Only after `close`."""
        self._thread.join()

    def _work(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._stopped.is_set():
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    break
                self._made.put(self._finish(item))
        except BaseException as error:  # noqa: BLE001  # the edge of the thread: the consumer gets it
            self._made.put(error)
            return
        self._made.put(_End())
