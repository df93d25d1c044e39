"""One replica: nothing is reduced."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import nn

from elastic3d.owners import SenderTurn
from elastic3d.parallel.leaf_squares import LeafSquares
from elastic3d.parallel.state import local
from elastic3d.parallel.witness import Witness


class SingleReplica:
    """One replica: autograd itself adds in micro-batch order.

    leaf: how many micro-batches are added up before they are added to those before them. With 1 the sum of the leaves
    is autograd's own. Leaves are put aside one by one where there is more to it: several micro-batches in each, some
    that are excluded and dropped, a witness that looks at them, or squares that are measured. The additions are the
    same.
    """

    scales_fillers = False

    def __init__(self, model: nn.Module, *, leaf: int = 1) -> None:
        self._model, self._leaf = model, leaf
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._holes: frozenset[int] = frozenset()
        self._witness: Witness | None = None
        self._squares: LeafSquares | None = None
        self._stage = 0
        self._open, self._complete = -1, False

    @functools.cached_property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._model.named_parameters())

    @property
    def _apart(self) -> bool:
        looked_at = self._witness is not None or self._squares is not None
        return self._leaf > 1 or bool(self._holes) or bool(self._sums) or looked_at

    def begin_step(self, micro_batches: int, excluded: Collection[int] = (), turns: Sequence[SenderTurn] = ()) -> None:
        """Note which leaves are dropped; the order of sums does not depend on the number of micro-batches."""
        self._holes = frozenset(number // self._leaf for number in excluded)

    def watch(self, witness: Witness | None, stage: int) -> None:
        """Have the gradients of every leaf looked at, or no longer. stage: whose they are."""
        self._put_aside()
        self._witness, self._stage = witness, stage

    def measure(self, squares: LeafSquares | None) -> None:
        """Have the gradients of every leaf measured, or no longer."""
        self._put_aside()
        self._squares = squares

    def drop(self) -> None:
        """Forget what the step has summed so far: its passes are made again."""
        self._sums.clear()
        self._open, self._complete = -1, False
        for parameter in self._model.parameters():
            parameter.grad = None

    def begin(self, round_: int, *, last: bool) -> None:
        """Put the leaf before aside, if this round begins another."""
        if round_ % self._leaf == 0:
            self._put_aside()
        self._now(round_)

    def hold(self) -> None:
        """Put a complete leaf aside, before a pass over the weights adds to it what belongs to the next."""
        if self._complete:
            self._put_aside()

    def reduce(self, round_: int, *, last: bool) -> None:
        """Put the leaf aside that the pass over the weights has completed."""
        self._now(round_)
        if self._complete:
            self._put_aside()

    def end_passes(self) -> None:
        """Do nothing: there are no other ranks."""

    def finish(self) -> None:
        """Make the sum of all leaves the gradients."""
        self._put_aside()
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()
        self._open, self._complete = -1, False

    def _now(self, round_: int) -> None:
        self._open, self._complete = round_ // self._leaf, (round_ + 1) % self._leaf == 0

    def _put_aside(self) -> None:
        """Add the gradients of a leaf to those of the leaves before it, and leave none; drop them if it is excluded."""
        if not self._apart or self._open < 0:
            return
        leaf, self._open, self._complete = self._open, -1, False
        totals, added = [], []
        named = [(name, parameter) for name, parameter in self._named if parameter.grad is not None]
        parameters = [parameter for _, parameter in named]
        if self._witness is not None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._witness.gradients(leaf, self._stage, 0, f"the gradients of stage {self._stage}", gradients)
        if self._squares is not None and leaf not in self._holes:
            held = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
            self._squares.add(leaf, [name for name, _ in named], held)
        for parameter in parameters:
            assert parameter.grad is not None
            if leaf in self._holes:
                pass
            elif parameter in self._sums:
                totals.append(self._sums[parameter])
                added.append(parameter.grad)
            else:
                self._sums[parameter] = parameter.grad
            parameter.grad = None
        if totals:
            torch._foreach_add_(totals, added)

    def present(self) -> set[str]:
        """Return the names of the parameters that have a gradient."""
        dropped = self._open in self._holes
        return {
            name
            for name, parameter in self._named
            if parameter in self._sums or (parameter.grad is not None and not dropped)
        }
