"""Gradients summed in micro-batch order, whatever the number of replicas and the ZeRO stage.

Micro-batch j belongs to dp rank j % dp, round j // dp, so rank order within a round, and rounds in turn, is micro-batch
order. In each round every rank sends each owner its piece of the gradient (an all-to-all: the bytes of one
reduce-scatter), and the owner adds the pieces in order onto a running sum, which goes into the gradients at the step's
end. The entry point is FSDP2's public `set_custom_reduce_scatter`. Three details make the sum that of plain autograd:

- A parameter that got no gradient in a micro-batch contributes -0.0, the one number that addition leaves no trace of,
  so that the places of the others do not move; sums start from -0.0 for the same reason, which is to start from the
  first piece. A parameter that got none in the whole step must end with `grad` None: `present` tells which did here.
- Pieces of micro-batches that only fill up the last round are dropped by their receiver, not multiplied by zero, which
  would keep a NaN.
- Every micro-batch reduces; without that torch would add up locally, in an order that depends on dp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from elastic3d.parallel.reduction.units import parameter_groups


class Ordered:
    """The ordered reduction of a whole model: one `_Fold` per FSDP unit."""

    scales_fillers = False

    def __init__(self, model: nn.Module, units: list[FSDPModule], *, zero: int) -> None:
        self._root, self._zero, self._dp = units[-1], zero, 1
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._folds = [_Fold(unit, names) for unit in units]

    def begin_step(self, micro_batches: int) -> None:
        """Tell every fold how many pieces count in the step."""
        for fold in self._folds:
            fold.micro_batches = micro_batches

    def begin(self, round_: int, *, last: bool) -> None:
        """Tell every fold which round's pieces come next; ZeRO-2 keeps parameters whole until the last."""
        for fold in self._folds:
            fold.round = round_
        self._root.set_requires_gradient_sync(True)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self._zero == 3)

    def finish(self) -> None:
        """Copy every fold's sum into the gradients."""
        for fold in self._folds:
            fold.finish()

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient here, and forget them."""
        names = set().union(*(fold.present for fold in self._folds))
        for fold in self._folds:
            fold.present.clear()
        return names


class _Fold(ReduceScatter):
    """FSDP2's `ReduceScatter` for one unit. Reads FSDP's parameter groups, which torch does not call public."""

    def __init__(self, unit: FSDPModule, names: dict[int, str]) -> None:
        self.round = self.micro_batches = 0
        self.present: set[str] = set()
        self._sum: torch.Tensor | None = None
        self._parameters: list[Any] = []
        unit.set_custom_reduce_scatter(self)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        for group in parameter_groups(unit):
            self._parameters += [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            self._names = {id(p): names[id(p.sharded_param)] for p in self._parameters}
            _before(group, "post_backward", self._fill)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for FSDP's flat gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add this round's pieces, in the order of their ranks, onto the sum; FSDP gets zeros until `finish`."""
        pieces = torch.empty_like(input_tensor)
        # As bytes: they are moved, not computed with, and gloo does not know every dtype.
        dist.all_to_all_single(pieces.view(torch.uint8), input_tensor.view(torch.uint8), group=group)
        if self._sum is None:
            self._sum = torch.full_like(output_tensor, -0.0)
        first = self.round * group.size()
        for index, piece in enumerate(pieces.view(group.size(), -1), start=first):
            if index < self.micro_batches:
                self._sum.add_(piece)
        output_tensor.zero_()

    def finish(self) -> None:
        """Copy the sum into the gradients of this rank's shards."""
        if self._sum is None:
            return
        at = 0
        for parameter in self._parameters:
            size = parameter.padded_sharded_param_size
            grad = parameter.sharded_param.grad._local_tensor
            if grad.numel():
                grad.copy_(self._sum[at : at + size.numel()].view(size)[: grad.shape[0]])
            at += size.numel()
        self._sum = None

    def _fill(self) -> None:
        for parameter in self._parameters:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is None:
                whole.grad = torch.full_like(whole, -0.0)
            else:
                self.present.add(self._names[id(parameter)])


def _before(target: Any, method: str, first: Any) -> None:
    original = getattr(target, method)

    def wrapped(*args: Any) -> Any:
        first()
        return original(*args)

    setattr(target, method, wrapped)
