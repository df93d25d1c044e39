"""Which machines were known to be slow when a generation was formed, and how often that was acted upon.

It stands in the record, so that a later leader, or one that sees no steps, plans with what was known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

COMPUTE = "compute"
"""The kind of slowness that grows with the work: less of it helps. Of any other kind the whole step takes longer."""

HOUR = 3600.0
"""Seconds after which one change for the sake of a machine is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A machine's work takes rho times as long as the others'; 1.0 for one that is well again.

    place: `Node.place`. kind: what is slow about it, in the finder's words. uses: how many changes were made for its
    sake when the generation was sealed; one of them is forgotten each hour.
    """

    place: str
    rho: float = 1.0
    kind: str = ""
    uses: float = 0.0

    @property
    def slow(self) -> bool:
        """Whether it holds the others up."""
        return self.rho > 1.0

    @property
    def speed(self) -> float:
        """How fast it computes, 1.0 for as fast as the others."""
        return 1.0 / self.rho if self.kind == COMPUTE else 1.0

    @property
    def delay(self) -> float:
        """How many times as long a step takes because of it, whatever it has to compute."""
        return 1.0 if self.kind == COMPUTE else self.rho

    def after(self, seconds: float) -> Pace:
        """Return what remains of it so many seconds later."""
        return replace(self, uses=max(0.0, self.uses - seconds / HOUR)) if self.uses else self


def slow_ones(paces: Iterable[Pace]) -> dict[str, float]:
    """Return how slow each slow machine is, by place."""
    return {pace.place: pace.rho for pace in paces if pace.slow}
