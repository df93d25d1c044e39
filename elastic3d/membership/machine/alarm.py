"""Waiting, for code that reads no clock: each question about the time records when to ask again."""

from __future__ import annotations

import math


class Alarm:
    """The present moment, and the earliest later one at which somebody wants to be asked again.

    Code that waits for a time asks `due`, so that nothing can wait without being woken.
    """

    __slots__ = ("next", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        self.next = math.inf

    def due(self, at: float) -> bool:
        """Return whether `at` has come; if not, be woken then."""
        if self.now >= at:
            return True
        self.next = min(self.next, at)
        return False
