"""One replica: nothing is reduced."""

from __future__ import annotations

import torch
from torch import nn


class SingleReplica:
    """One replica: autograd itself adds in micro-batch order.

    leaf: how many micro-batches are added up before they are added to those before them. With 1 the sum of the leaves
    is autograd's own.
    """

    scales_fillers = False

    def __init__(self, model: nn.Module, *, leaf: int = 1) -> None:
        self._model, self._leaf = model, leaf
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def begin_step(self, micro_batches: int) -> None:
        """Do nothing: the order of sums does not depend on their number."""

    def begin(self, round_: int, *, last: bool) -> None:
        """Put the leaf before aside, if this round begins another."""
        if round_ % self._leaf == 0:
            self._put_aside()

    def hold(self) -> None:
        """Do nothing."""

    def reduce(self, round_: int, *, last: bool) -> None:
        """Put the leaf aside that the pass over the weights has completed."""
        if (round_ + 1) % self._leaf == 0:
            self._put_aside()

    def finish(self) -> None:
        """Make the sum of all leaves the gradients."""
        if not self._sums:
            return
        self._put_aside()
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    def _put_aside(self) -> None:
        """Add the gradients of a leaf to those of the leaves before it, and leave none."""
        if self._leaf == 1:
            return
        totals, added = [], []
        for parameter in self._model.parameters():
            if parameter.grad is None:
                continue
            if parameter in self._sums:
                totals.append(self._sums[parameter])
                added.append(parameter.grad)
            else:
                self._sums[parameter] = parameter.grad
            parameter.grad = None
        if totals:
            torch._foreach_add_(totals, added)

    def present(self) -> set[str]:
        """Return the names of the parameters that have a gradient."""
        return {
            name
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None or parameter in self._sums
        }
