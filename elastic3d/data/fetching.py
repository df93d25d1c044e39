"""Fetch the bytes of samples before they are asked for, by threads that only wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from elastic3d import threads

AT_ONCE = 16
"""Most threads of one process: object stores answer each in some 10 to 100 ms, and the rest is their bandwidth."""


class Fetcher:
    """Holds the bytes of at most `most` samples, or has them under way. `want` and `get` are for one thread at a time.

    fetch: returns a sample's bytes by its number; called by threads of its own, and by `get`.
    """

    def __init__(self, fetch: Callable[[int], bytes], most: int) -> None:
        self._fetch, self._most = fetch, most
        self._coming: dict[int, Future[bytes]] = {}
        self._queue: SimpleQueue[tuple[int, Future[bytes]]] = SimpleQueue()
        for number in range(min(most, AT_ONCE)):
            threads.start(self._work, name=f"elastic3d-fetch-{number}", edge=threads.Edge.AGAIN)

    def want(self, numbers: Sequence[int]) -> None:
        """Begin to fetch the first `most` of these samples, nearest first; those not among them are dropped."""
        wanted = dict.fromkeys(numbers[: self._most])
        for number in [one for one in self._coming if one not in wanted]:
            self._coming.pop(number).cancel()
        for number in wanted:
            if number not in self._coming:
                future: Future[bytes] = Future()
                self._coming[number] = future
                self._queue.put((number, future))

    def get(self, number: int) -> bytes:
        """Return a sample's bytes, which are let go of; raises what fetching them raised."""
        future = self._coming.pop(number, None)
        return self._fetch(number) if future is None else future.result()

    def _work(self) -> None:
        while True:
            number, future = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                data = self._fetch(number)
            except BaseException as error:  # noqa: BLE001  # whoever asks for the sample gets it
                future.set_exception(error)
            else:
                future.set_result(data)
            # The last references of this thread: it may wait for long.
            del future
            data = b""
