"""What this member says of its generation's speed: which nodes are slow, how long steps take, what changes cost.

It is the node of rank 0 that says it, for all; each member keeps what it hears, since it may hold rank 0 next.
"""

from __future__ import annotations

import statistics
from collections import deque

from elastic3d.membership.events import NodesSlow
from elastic3d.membership.machine.view import View
from elastic3d.membership.slowness import SpeedReport

STEPS = 32
"""Steps of whose durations the median counts."""

CHANGES = 3
"""Planned changes of whose costs the greatest counts."""


class OwnSpeeds:
    """The newest finding (`heard`), and the times of steps. All times are monotonic seconds."""

    def __init__(self) -> None:
        self.heard: SpeedReport | None = None
        self._key, self._start = "", 0.0
        self._stepped_at = 0.0
        self._durations: deque[float] = deque(maxlen=STEPS)
        self._costs: deque[float] = deque(maxlen=CHANGES)
        self._change: tuple[str, float, float, int] | None = None

    def hear(self, event: NodesSlow) -> None:
        """Take in a finding."""
        self.heard = SpeedReport(
            key=event.key,
            slow=dict(event.slow),
            step_seconds=statistics.median(self._durations) if self._durations else 0.0,
            change_seconds=max(self._costs, default=0.0),
            start_seconds=self._start,
        )

    def stepped(self, view: View, key: str, now: float) -> None:
        """Take in that trainers of the generation `key` made a step.

        A change costs the time from its proposal to the first step in its generation, less that of the steps made
        meanwhile: trainers that are built beside the others slow these down. How long a generation took to begin that
        was not changed to from another one is what a change costs at most.
        """
        if key == self._key:
            self._durations.append(now - self._stepped_at)
            if self._change is not None:
                proposal, since, step, made = self._change
                self._change = (proposal, since, step, made + 1)
        else:
            if self._change is not None and self._change[0] == key:
                _, since, step, made = self._change
                self._costs.append(max(0.0, now - since - (made + 1) * step))
            elif view.generation is not None and view.generation.key == key:
                self._start = max(0.0, now - view.sealed_at)
            self._key, self._change = key, None
            self._durations.clear()
        self._stepped_at = now
        coming = view.coming
        if coming is None:
            self._change = None
        elif (self._change is None or self._change[0] != coming.key) and self._durations:
            self._change = (coming.key, now, statistics.median(self._durations), 0)

    def said(self, view: View) -> SpeedReport | None:
        """Return what to report: nothing by a member that does not hold rank 0, or about another generation."""
        current = view.generation
        if self.heard is None or current is None or self.heard.key != current.key or not current.nodes:
            return None
        return self.heard if current.nodes[0].id == view.me.node.id else None
