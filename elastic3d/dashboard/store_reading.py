"""The one reader of a job's store, on a thread of its own: a store that is slow, or away, holds nothing else up.

A read that hangs cannot be taken back. So nobody waits for one longer than `PATIENCE`; the thread goes on when the read
ends, and until then the page says since when the store has not answered, beside what it last showed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from checkpointing.errors import CheckpointError
from checkpointing.inspection.difference import Difference
from elastic3d.clock import SYSTEM, Clock
from elastic3d.dashboard.store_listing import StoreLister, StoreListing
from elastic3d.errors import Elastic3dError

EVERY, UNWATCHED = 10.0, 60.0
"""Seconds from one look to the next while somebody watches the page, and while nobody does."""

SHARE = 4.0
"""Looks that take long are made less often: at least so many times as long apart as one takes."""

PATIENCE = 30.0
"""Seconds after which the store is said not to answer, and nobody waits for a comparison any more."""


class StoreBusy(Exception):
    """The store has not answered in time, or is being asked for something else. Trying again may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSeen:
    """What is known of the store. Times are of this machine's wall clock.

    listing: as it last was, None until it was read. read_at: when. problem: why the last look failed, "" if it did not.
    waiting_since: since when it has not answered, None unless that is `PATIENCE` or longer.
    """

    url: str
    listing: StoreListing | None = None
    read_at: float = 0.0
    problem: str = ""
    waiting_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    before: str
    after: str
    answer: Future[Difference]


class StoreReader:
    """Looks at a store again and again, and compares checkpoints in between.

    url: of the store, without secrets. watched: whether anybody looks at the page. patience: see `PATIENCE`.
    """

    def __init__(
        self,
        lister: StoreLister,
        url: str,
        *,
        watched: Callable[[], bool] = lambda: True,
        patience: float = PATIENCE,
        clock: Clock = SYSTEM,
    ) -> None:
        self._lister, self._watched, self._patience, self._clock = lister, watched, patience, clock
        self._lock = threading.Lock()
        self._seen = StoreSeen(url=url)
        self._asked: tuple[float, float] | None = None
        self._comparing = threading.Semaphore(1)
        self._wishes: queue.SimpleQueue[_Comparison | None] = queue.SimpleQueue()
        self._ended = threading.Event()

    # From any thread.

    def seen(self) -> StoreSeen:
        """Return what is known of the store; waits for nothing."""
        with self._lock:
            if self._asked is None or self._clock.monotonic() - self._asked[0] < self._patience:
                return self._seen
            return replace(self._seen, waiting_since=self._asked[1])

    def difference(self, before: str, after: str) -> Difference:
        """Return what changed between two checkpoints, by any of their names; waits `PATIENCE` at most.

        StoreBusy if the store does not answer in time, or another comparison is under way; CheckpointError, OSError.
        """
        if not self._comparing.acquire(blocking=False):
            raise StoreBusy("the store is read for another comparison; try again in a moment")
        wish = _Comparison(before=before, after=after, answer=Future())
        wish.answer.add_done_callback(lambda _: self._comparing.release())
        self._wishes.put(wish)
        try:
            return wish.answer.result(self._patience)
        except TimeoutError:
            wish.answer.cancel()
            raise StoreBusy(f"the store has not answered within {self._patience:g} s; try again later") from None

    def hurry(self) -> None:
        """Look as often as is due while somebody watches: somebody came."""
        self._wishes.put(None)

    def stop(self) -> None:
        """End `run` when the store answers; at once if nothing is asked of it."""
        self._ended.set()
        self._wishes.put(None)

    # The thread's own.

    def run(self) -> None:
        """Look until `stop`."""
        while not self._ended.is_set():
            begun = self._clock.monotonic()
            complete = self._look()
            took = self._clock.monotonic() - begun
            self._serve(begun + took, SHARE * took if complete else None)

    def _look(self) -> bool:
        """Look once; return whether that was all there is to read for now."""
        self._begin()
        try:
            listing = self._lister.look()
        except (CheckpointError, OSError, ValueError) as error:
            self._end(replace(self._seen, problem=_in_words(error)))
            return True
        self._end(replace(self._seen, listing=listing, read_at=self._clock.wall(), problem=""))
        return listing.complete

    def _serve(self, looked: float, least: float | None) -> None:
        """Compare what is asked for, until the next look is due; what is asked already in any case.

        looked: when the last one ended. least: seconds between the two, None for none.
        """
        while not self._ended.is_set():
            pause = 0.0 if least is None else max(EVERY if self._watched() else UNWATCHED, least)
            try:
                wish = self._wishes.get(timeout=max(0.0, looked + pause - self._clock.monotonic()))
            except queue.Empty:
                return
            if wish is None or not wish.answer.set_running_or_notify_cancel():
                continue
            self._begin()
            try:
                wish.answer.set_result(self._lister.difference(wish.before, wish.after))
            except (CheckpointError, Elastic3dError, OSError, ValueError) as error:
                wish.answer.set_exception(error)
            except BaseException as error:
                wish.answer.set_exception(error)
                raise
            finally:
                self._end(self._seen)

    def _begin(self) -> None:
        with self._lock:
            self._asked = (self._clock.monotonic(), self._clock.wall())

    def _end(self, seen: StoreSeen) -> None:
        with self._lock:
            self._seen, self._asked = seen, None


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
