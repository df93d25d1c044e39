"""One tracker's thread: it writes what the storage lacks, waits and tries again where that fails.

Nobody waits for it but the end of the run, and that for a bounded time. What is not written yet stays in `Points`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from checkpointing.stores.address import redacted_within
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import TrackerError
from elastic3d.trackers.points import Point, Points, Void
from elastic3d.trackers.tracker import Position, Tracker
from elastic3d.trackers.turn import Turn, rewound_to

SHORTEST, LONGEST = 1.0, 60.0
"""Seconds from a failure to the next try: doubled with each failure in a row, up to the longer one."""

SILENT = 60.0
"""Seconds without an answer of a tracker after which that is reported."""

BATCH = 512


class _Interrupted(Exception):
    """This node no longer writes, or not now."""


class TrackerWriter:
    """Writes `points` to a tracker while it has a turn. All methods are for the keeper's main thread.

    name: for people. emit: takes the events, on any thread. pace: seconds from one flush to the
    next, None for what the tracker wants. rest: seconds from the first failure in a row to the next try. clock: for
    deadlines; waiting takes real time.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        points: Points,
        *,
        run_id: str,
        emit: Callable[..., None],
        pace: float | None = None,
        rest: float = SHORTEST,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name
        self._tracker, self._points, self._run_id, self._emit = tracker, points, run_id, emit
        self._pace, self._shortest, self._clock = pace, rest, clock
        self._changed = threading.Condition()
        self._turn: Turn | None = None
        self._voids: tuple[Void, ...] = ()  # as when the tracker was opened
        self._opened, self._called = False, False  # whether it can be written to, and whether it is to be closed
        self._held, self._stale = False, False
        self._deadline: float | None = None
        self._cursor = 0
        self._gap_said = 0
        self._failures, self._error, self._due = 0, "", 0.0
        self._busy_since: float | None = None
        self._silent_said = False
        self._thread: threading.Thread | None = None

    def begin(self, turn: Turn) -> None:
        """Write from now on, or go on writing in another generation."""
        with self._changed:
            self._turn = turn
            self._due = 0.0
            self._changed.notify()
        if self._thread is None:
            self._thread = threads.start(
                self._run, name=f"tracker-{self.name}", edge=threads.Edge.AGAIN, failed=self._failed
            )

    def stop(self) -> None:
        """Write no more: another node does, or may do so."""
        with self._changed:
            self._turn, self._stale = None, True
            self._changed.notify()

    def hold(self, held: bool) -> None:
        """Write nothing while it is not certain that this node is still the one that writes."""
        with self._changed:
            self._held = held
            self._stale |= held
            self._changed.notify()

    def heard(self) -> None:
        """Take note that there are more points."""
        with self._changed:
            self._changed.notify()

    def look(self) -> None:
        """Report a tracker that does not answer."""
        since = self._busy_since
        if since is None or self._silent_said or self._clock.monotonic() - since < SILENT:
            return
        self._silent_said = True
        self._emit("tracker.failed", tracker=self.name, error=f"no answer for {SILENT:.0f} s", detail=_MEANWHILE)

    def finish(self, deadline: float) -> None:
        """Write what is left and close, by this time at the latest; `wait` says when that is done.

        Nothing is written where this node cannot know whether another one does.
        """
        with self._changed:
            self._deadline, self._due = deadline, 0.0
            self._changed.notify()

    def wait(self) -> None:
        """Wait until all is written or the deadline is over, and report what is not written."""
        if self._thread is None or self._deadline is None:
            return
        self._thread.join(timeout=max(0.0, self._deadline - self._clock.monotonic()) + 0.2)
        left = self._points.after(self._cursor, BATCH * BATCH) if self._turn is not None else []
        if left:
            self._emit(
                "tracker.unwritten",
                tracker=self.name,
                steps=[left[0].step, left[-1].step],
                count=len(left),
                error=self._error or ("etcd was away: another node may write" if self._held else "no answer in time"),
            )
        elif self._thread.is_alive():
            self._emit("tracker.failed", tracker=self.name, error="it did not close in time", detail=_CLOSING)

    # On the tracker's thread.

    def _run(self) -> None:
        while self._wait():
            self._busy_since = self._clock.monotonic()
            try:
                turn = self._turn
                if turn is None or self._held:
                    self._close()
                else:
                    self._write(turn)
            except _Interrupted:
                self._close()
            except Exception as error:  # noqa: BLE001  # whatever a tracker raises, training goes on
                self._failed(error)
            finally:
                self._busy_since, self._silent_said = None, False
        self._close()

    def _wait(self) -> bool:
        """Wait for something to do; return False when the run is over."""
        with self._changed:
            while True:
                now, turn = self._clock.monotonic(), self._turn
                left = bool(self._points.after(self._cursor, 1))
                idle = turn is None or self._held
                if self._deadline is not None and (idle or not left or now >= self._deadline):
                    return False
                if turn is None or idle:
                    if self._called:
                        return True
                elif now >= self._due and (left or self._outdated(turn)):
                    return True
                later = self._due - now
                self._changed.wait(timeout=later if later > 0 else None)

    def _outdated(self, turn: Turn) -> bool:
        """Return whether the tracker is to be opened, since another may have written, or the run has gone back."""
        return not self._opened or self._stale or self._voids != turn.voids

    def _write(self, turn: Turn) -> None:
        if self._outdated(turn):
            self._close()
            with self._changed:
                if self._turn is None or self._held:
                    raise _Interrupted
                self._stale = False
            self._open(turn)
        batch = self._points.after(self._cursor, BATCH)
        for point in batch:
            self._check(turn)
            self._tracker.write(point.step, point.values, point.at)
        if batch:
            self._check(turn)
            self._tracker.flush()
            for before, point in zip([self._cursor, *(one.step for one in batch)], batch, strict=False):
                self._look_for_gap(before, point)
            self._cursor = batch[-1].step
            self._settle()
        if self._error or self._silent_said:
            self._emit("tracker.mended", tracker=self.name, step=self._cursor)
        self._failures, self._error = 0, ""
        with self._changed:
            if len(batch) < BATCH and self._deadline is None:
                self._due = self._clock.monotonic() + (self._tracker.every if self._pace is None else self._pace)

    def _open(self, turn: Turn) -> None:
        self._called = True
        position = _checked(self._tracker.open(self._run_id, turn.config))
        back, self._cursor = rewound_to(turn, position), position.step if position is not None else 0
        if back is not None and self._tracker.rewind(back):
            self._cursor = back
        elif back is not None:
            # Steps that are only made again have the values that are there; after the run went back, they have others.
            again = rewound_to(replace(turn, restored=None), position)
            assert position is not None
            self._kept(back, position.step, both=again is not None)
            self._cursor = self._cursor if again is None else again
            self._settle()
        self._opened, self._voids = True, turn.voids
        self._emit("tracker.opened", tracker=self.name, step=self._cursor)

    def _settle(self) -> None:
        """Remove nothing more of another life of the run: what comes after the state is of this one, or has to stay.

        Not before: an opening after which nothing was written may have left no trace.
        """
        with self._changed:
            if self._turn is not None:
                self._turn = replace(self._turn, restored=None)

    def _kept(self, back: int, newest: int, *, both: bool) -> None:
        first = "they were written before, and are not written again"
        second = "they are made again with other values, which it shows beside those, or not at all"
        detail = (
            f"the run goes on from step {back}, and this tracker cannot forget its points of steps {back + 1} to "
            f"{newest}: {second if both else first}"
        )
        self._emit("tracker.kept", tracker=self.name, steps=[back + 1, newest], detail=detail)

    def _check(self, turn: Turn) -> None:
        now = self._turn
        if now is None or self._held or self._outdated(now):
            raise _Interrupted

    def _look_for_gap(self, before: int, point: Point) -> None:
        if point.step > before + 1 and point.step > self._gap_said:
            self._gap_said = point.step
            detail = "no node that is left has heard of them, or they are too long ago"
            self._emit("tracker.gap", tracker=self.name, steps=[before + 1, point.step - 1], detail=detail)

    def _failed(self, error: BaseException) -> None:
        """Report the first failure in a row, and try again later, from what the storage has then."""
        self._close()
        again = bool(self._error)
        self._error = _said(error)
        if not again and not self._silent_said:
            self._emit("tracker.failed", tracker=self.name, error=self._error, detail=_MEANWHILE)
        self._failures += 1
        with self._changed:
            self._due = self._clock.monotonic() + min(LONGEST, self._shortest * 2 ** min(self._failures - 1, 16))

    def _close(self) -> None:
        self._opened = False
        if not self._called:
            return
        self._called = False
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001  # what it has is read back when it is opened anew
            if not self._error:
                self._emit("tracker.failed", tracker=self.name, error=_said(error), detail=_CLOSING)


_MEANWHILE = "training goes on; the newest points are kept in memory, and are written as soon as it works again"
_CLOSING = "closing it failed; what it was given before may be incomplete"


def _said(error: BaseException) -> str:
    """Return what an error says: that of a client may hold the server's address, with the password."""
    return redacted_within(f"{type(error).__name__}: {error}")


def _checked(position: Position | None) -> Position | None:
    """Return what `open` returned; TrackerError if that is no position."""
    if position is None:
        return None
    if not isinstance(position, tuple) or not all(isinstance(part, int) for part in position) or len(position) > 2:
        raise TrackerError(f"open() of a tracker returns an elastic3d.trackers.Position or None, and not {position!r}")
    return Position(*position)
