"""A clock for tests that set the time themselves."""

from __future__ import annotations

from elastic3d.clock import SystemClock


class HandClock(SystemClock):
    """The wall clock and the monotonic clock stand still until they are set."""

    def __init__(self, wall: float = 0.0) -> None:
        self.now, self.at = 100.0, wall

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.at
