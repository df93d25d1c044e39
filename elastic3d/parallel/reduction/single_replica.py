"""One replica: nothing is reduced."""

from __future__ import annotations

from torch import nn


class SingleReplica:
    """One replica: autograd itself adds in micro-batch order."""

    scales_fillers = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def begin_step(self, micro_batches: int) -> None:
        """Do nothing: the order of sums does not depend on their number."""

    def begin(self, round_: int, *, last: bool) -> None:
        """Do nothing."""

    def hold(self) -> None:
        """Do nothing."""

    def reduce(self, round_: int, *, last: bool) -> None:
        """Do nothing: the pass over the weights has added to the gradients."""

    def finish(self) -> None:
        """Do nothing."""

    def present(self) -> set[str]:
        """Return the names of the parameters that have a gradient."""
        return {name for name, parameter in self._model.named_parameters() if parameter.grad is not None}
