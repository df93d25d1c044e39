"""How old the safe step is, and whether that is too old: the work that a node's death would cost.

A snapshot becomes safe when every rank holds it at home and at its buddy. A single rank that cannot reach its buddy
holds back the safe step of all, and nothing else shows that until a node dies and every step since is done again.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SECONDS = 30.0
"""Age at which the safe step is too old, where steps are quick."""

MOST_SNAPSHOTS = 20
"""Snapshots behind which the safe step is too old, whatever its age."""

ORDINARY_SNAPSHOTS = 4
"""Snapshots by which the safe step may be behind at any age: two wait to become safe, and a vote reports it one step
later."""

LEAST_SNAPSHOTS = 2 * ORDINARY_SNAPSHOTS
"""The smallest bound allowed: half of it, within which all is well again, must be the ordinary number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The safe step is too old.

    step: the last one made. safe_step: the one a death would go back to, -1 if no step of this generation is safe.
    behind: steps between them. age: seconds since the safe step last moved.
    """

    step: int
    safe_step: int
    behind: int
    age: float

    def __str__(self) -> str:
        safe = f"the safe step is {self.safe_step}" if self.safe_step >= 0 else "no step is safe"
        return f"{safe}, {self.behind} steps and {self.age:.0f} s behind step {self.step}"


class SafeStep:
    """The safe step of one generation, as its votes report it. every: steps from one snapshot to the next.

    most_seconds, most_snapshots: the age, and how many snapshots behind, beyond which it is too old.
    """

    def __init__(
        self,
        *,
        every: int,
        start: int,
        now: float,
        most_seconds: float = MOST_SECONDS,
        most_snapshots: int = MOST_SNAPSHOTS,
    ) -> None:
        self._every, self._start = every, start
        self._most_seconds, self._most_snapshots = most_seconds, most_snapshots
        self._step, self._safe, self._moved_at = start, -1, now
        self._stale = False

    def stepped(self, step: int, safe_step: int, now: float, *, every: int | None = None) -> None:
        """Take note of a step and its vote. every: steps between snapshots from now on, None: as before."""
        self._step = step
        self._every = self._every if every is None else every
        if safe_step > self._safe:
            self._safe, self._moved_at = safe_step, now

    def newest(self) -> dict[str, int]:
        """Return the last step and the safe one."""
        return {"step": self._step, "safe_step": self._safe}

    def stale(self, now: float) -> Staleness | None:
        """Return how old the safe step is if it is too old, else None.

        Once too old, it is well again only within half of the bounds, so that the report does not flicker.
        """
        part = 0.5 if self._stale else 1.0
        behind, age = self._step - max(self._safe, self._start), now - self._moved_at
        old = age > part * self._most_seconds and behind > part * ORDINARY_SNAPSHOTS * self._every
        self._stale = self._every > 0 and (old or behind > part * self._most_snapshots * self._every)
        if not self._stale:
            return None
        return Staleness(step=self._step, safe_step=self._safe, behind=behind, age=age)
