"""Virtual time: a heap of what is to happen, and nothing happens between."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """Calls what is due, in order of time; what is due at one time is called in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._tie = 0

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call at virtual time `when`, at once if that is past."""
        self._tie += 1
        heapq.heappush(self._heap, (max(when, self.now), self._tie, call, arguments))

    def later(self, delay: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call in `delay` virtual seconds."""
        self._tie += 1
        heapq.heappush(self._heap, (self.now + delay, self._tie, call, arguments))

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
        self.now = max(self.now, until)

    def step(self) -> bool:
        """Let the next thing happen; return whether there was one."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        call(*arguments)
        return True

    def next_at(self) -> float | None:
        """Return when the next thing happens."""
        return self._heap[0][0] if self._heap else None
