"""When things happened, for documents that change only if something did.

Ages grow between two looks at a job though nothing happened, and no two clocks agree to the millisecond. So the page is
given moments, and counts by itself; a moment that was said before is said again unless it changed.
"""

from __future__ import annotations

SLACK = 2.0
"""Seconds by which a moment may seem to move because clocks and leases are read a little late."""


class Moments:
    """The moments of one job, by what they are of. For one thread."""

    def __init__(self) -> None:
        self._steady: dict[str, float] = {}
        self._fixed: dict[str, tuple[object, float]] = {}

    def steady(self, name: str, at: float) -> float:
        """Return moment `name`: what it was before, if it lies within `SLACK` of that."""
        before = self._steady.get(name)
        if before is None or abs(before - at) > SLACK:
            self._steady[name] = at
        return self._steady[name]

    def fixed(self, name: str, figure: object, at: float) -> float:
        """Return moment `name` as it was when `figure` was first seen: an age that is reported now and then."""
        before = self._fixed.get(name)
        if before is None or before[0] != figure:
            self._fixed[name] = (figure, at)
        return self._fixed[name][1]
