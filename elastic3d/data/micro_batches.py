"""One rank's part of one step: its micro-batches, and what they count for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic3d.owners import SenderTurn

PASSED_OVER = 1000
"""A micro-batch j that is run once more has the number M * PASSED_OVER + j: no number below it counts or fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on one rank; input and target are None on stages that need neither.

    index: its number j within the step. counts: False for one that is run only for its collectives. like: the number of
    the micro-batch whose samples it has and whose random numbers it draws: its own if it counts. One that does not
    count then uses the same parameters as another rank's, and no others get a gradient.
    """

    index: int
    like: int
    counts: bool
    input: Any
    target: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's part of one step. samples, sample_sum: really loaded by those of its micro-batches that count.

    count: number M of the step's micro-batches over all ranks. sizes: the number of samples of each of them, () where
    all have as many. excluded: the numbers of those that are no part of the update, though they are run;
    excluded_samples, excluded_sum: loaded by those of them that are this rank's. summed:
    whether the others are to be added up; False where all are only run to see what comes out. turns: which dp ranks
    send gradients, leaf by leaf; () if all do each time.
    """

    step: int
    count: int
    micro_batches: tuple[MicroBatch, ...]
    samples: int
    sample_sum: int
    sizes: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()
    excluded_samples: int = 0
    excluded_sum: int = 0
    summed: bool = True
    turns: tuple[SenderTurn, ...] = ()

    @property
    def counted(self) -> int:
        """How many of its micro-batches may be added up, those with the lowest numbers; the excluded are not."""
        return self.count if self.summed else 0

    @property
    def empty(self) -> bool:
        """Whether all its micro-batches are excluded: it has nothing to learn from."""
        return len(self.excluded) == self.count

    def divisor(self, part: MicroBatch) -> float:
        """Return by what the mean loss of a micro-batch is divided, so that all of them add up to that of the step.

        The number of samples that make up the update, over that of the micro-batch: where all have as many, the number
        of micro-batches that make up the update.
        """
        if not self.sizes:
            return max(1, self.count - len(self.excluded))
        left = sum(self.sizes) - sum(self.sizes[number] for number in self.excluded)
        return max(1, left) / self.sizes[part.like]
