"""The newest points of a run's curves, which every node that trains keeps in memory: what is to be written.

Whoever writes next has them, and so need not have been told what the node that wrote before had left to do.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Mapping
from dataclasses import dataclass

KEPT = 32_768
"""Points that are kept: about 20 MB, and 70 MB more with all the numbers that scripts may log; hours of a tracker that
cannot be reached, at a step a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The values of one step. generation: in which it was made. at: seconds since 1970, by this node's clock."""

    step: int
    generation: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Void:
    """Points of more than `step` updates that were made in generations below `before` are not part of the run."""

    before: int
    step: int

    def covers(self, step: int, generation: int) -> bool:
        """Return whether a point is none of the run's any more."""
        return step > self.step and generation < self.before


class Points:
    """Points by rising step. For any thread.

    A step that is made again after a failure gives the same bits: the first point of it stays.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._voids: tuple[Void, ...] = ()

    def add(self, point: Point) -> None:
        """Keep a point, unless there is one of its step; forget the oldest if there are too many."""
        with self._lock:
            if any(void.covers(point.step, point.generation) for void in self._voids):
                return
            at = bisect.bisect_left(self._points, point.step, key=_step)
            if at < len(self._points) and self._points[at].step == point.step:
                return
            self._points.insert(at, point)
            del self._points[: -self._limit]

    def after(self, step: int, most: int) -> list[Point]:
        """Return the first points of later steps than `step`, in order."""
        with self._lock:
            at = bisect.bisect_right(self._points, step, key=_step)
            return self._points[at : at + most]

    def leave_out(self, voids: tuple[Void, ...]) -> None:
        """Drop the points that these cover, and take none of them from now on."""
        with self._lock:
            self._voids = voids
            self._points = [p for p in self._points if not any(void.covers(p.step, p.generation) for void in voids)]

    @property
    def newest(self) -> int:
        """The newest step, 0 for none."""
        with self._lock:
            return self._points[-1].step if self._points else 0


def _step(point: Point) -> int:
    return point.step
