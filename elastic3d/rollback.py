"""A run that went back because its loss jumped up, and what it leaves out since: as records keep it, and states.

The update that began a spike, and the steps just before it, are not tried again: positions [first, stop) of the run
are holes from then on. Which ones is decided by votes and by what the state says, so that nobody need remember it: a
job that has lost this record makes the same steps, sees the same spike, and leaves out the same.

The hole does not begin at the state that is gone on from, which depends on what happened to be saved, but a fixed
number of steps before the spike. An older state leads up to there by the same steps, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST, WITHIN = 3, 10_000
"""A run goes back at most so many times within so many steps: what recurs is not its samples' fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The loss jumped up in step `spike`; it is not made, and of generations below `before` no later state counts."""

    before: int
    """The generation that follows the one in which it was seen."""
    step: int
    """States of more updates are not gone on from."""
    spike: int
    """The step, by the number of updates before it."""
    first: int
    """The position from which on samples are left out."""
    stop: int
    """The position of the first that are not."""

    @property
    def near_the_beginning(self) -> bool:
        """Whether no more steps lie before what is left out than are left out."""
        return 2 * self.step <= self.spike + 1

    def leads_from(self, generation: int, step: int) -> bool:
        """Return whether the state of a step that was made in a generation is one to go on from, and does not know."""
        return generation < self.before and step <= self.step


def new_to(rollbacks: Iterable[Rollback], generation: int, step: int) -> tuple[Rollback, ...]:
    """Return those that a state must be told of: it was made before them, and they went back to it or beyond."""
    return tuple(one for one in rollbacks if one.leads_from(generation, step))


def exhausted(spikes: Iterable[int], step: int) -> bool:
    """Return whether a run that went back for these spikes may not do so for one more in `step`."""
    return sum(1 for spike in spikes if spike > step - WITHIN) >= MOST
