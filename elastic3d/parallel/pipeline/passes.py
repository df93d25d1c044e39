"""The forward and backward passes of one step: their interface, and a plain loop for one stage.

Each micro-batch's mean loss is divided by the step's number M of them, less those that are excluded, so that the step's
gradient is that of the mean over the others; for sums over tokens see `numerics.objective`. Losses are kept by the
number of their micro-batch; only the last stage has any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from elastic3d.data.micro_batches import Batch, MicroBatch
from elastic3d.health.phases import Phase
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.numerics.objective import weighed
from elastic3d.parallel.randomness import Randomness, within_passes
from elastic3d.parallel.reduction.protocol import Reduction
from elastic3d.parallel.witness import Witness
from elastic3d.port import UNRECORDED, Progress

LossFunction = Callable[[Any, Any], torch.Tensor]


class Passes(Protocol):
    """Run the forward and backward passes of a step on this rank.

    witness: told what comes out of the passes where they are audited, None otherwise.
    """

    witness: Witness | None

    def run(self, batch: Batch, loss_fn: LossFunction) -> dict[int, torch.Tensor]:
        """Leave the step's gradients to the reduction; return this rank's losses by the number of their micro-batch."""
        ...

    def output(self, given: Any) -> Any:
        """Return the model's output for one input, None on ranks that do not have its last stage.

        For evaluation, without gradients and between steps; a collective of all that compute one input together.
        """
        ...


class Loop:
    """The passes of a single stage, micro-batch after micro-batch."""

    def __init__(
        self, model: nn.Module, reduction: Reduction, randomness: Randomness, progress: Progress = UNRECORDED
    ) -> None:
        self._model, self._reduction, self._randomness, self._progress = model, reduction, randomness, progress
        self._caller = Caller(model)
        self.witness: Witness | None = None

    @within_passes
    def run(self, batch: Batch, loss_fn: LossFunction) -> dict[int, torch.Tensor]:
        """Run every micro-batch forward and back."""
        losses = {}
        self._reduction.begin_step(batch.counted, batch.excluded, batch.turns)
        for round_, part in enumerate(batch.micro_batches):
            self._randomness.at(batch.step, part.like)
            self._reduction.begin(round_, last=round_ == len(batch.micro_batches) - 1)
            self._progress.phase(Phase.FORWARD)
            self._progress.tick(chunk=round_)
            loss = loss_fn(self._caller(self._model, part.input), part.target)
            if part.counts:
                losses[part.index] = loss.detach()
            if self.witness is not None:
                self.witness.output(round_, 0, loss)
            self._progress.phase(Phase.BACKWARD)
            self._progress.tick(chunk=round_)
            scaled(loss, part, self._reduction, batch.divisor(part)).backward()  # type: ignore[no-untyped-call]
        self._reduction.end_passes()
        return losses

    def output(self, given: Any) -> Any:
        """Return the model's output."""
        return self._caller(self._model, given)


def scaled(loss: torch.Tensor, part: MicroBatch, reduction: Reduction, divisor: float) -> torch.Tensor:
    """Return the loss whose gradients are to be summed."""
    loss = weighed(loss, divisor)
    return loss if part.counts or not reduction.scales_fillers else loss * 0.0
