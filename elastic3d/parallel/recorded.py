"""FSDP's own collectives as torch makes them, each noted in the rank's progress record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.dtypes import dtype_mark
from elastic3d.parallel.reduction.units import parameter_groups
from elastic3d.port import Progress

_GATHER, _SCATTER = 1, 2

# torch 2.13 has other names for the same operations, and warns of the former ones.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Recorded:
    """A collective of one unit. unit: its number on this rank, in the order in which units were made."""

    def __init__(self, progress: Progress, unit: int) -> None:
        self._progress, self._unit = progress, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer, as torch does by default."""
        return torch.empty(*size, dtype=dtype, device=device)


class RecordedGather(_Recorded):
    """The gathering of a unit's parameters, for `FSDPModule.set_custom_all_gather`.

    On a device the call only queues it, in a stream of its own; what computes waits for it later, in `noted`.
    """

    _posted: tuple[int, int] | None = None

    def noted(self, wait: Callable[[], Any]) -> Callable[[], None]:
        """Return what waits for the gathered parameters, and has that noted."""

        def noted_wait() -> None:
            posted, self._posted = self._posted, None
            if posted is None:
                wait()
                return
            number, mark = posted
            self._progress.wait(Axis.SHARD, number, mark)
            wait()
            self._progress.leave(Axis.SHARD, number)

        return noted_wait

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather."""
        progress = self._progress
        progress.tick(unit=self._unit)
        mark = fingerprint(_GATHER, output_tensor.numel(), dtype_mark(output_tensor.dtype))
        number = progress.enter(Axis.SHARD, mark)
        work: dist.Work | None = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        progress.leave(Axis.SHARD, number)
        if output_tensor.device.type != "cpu":
            self._posted = number, mark
        return work


class RecordedScatter(_Recorded):
    """The reduction of a unit's gradients to its shards, for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter."""
        progress = self._progress
        progress.tick(unit=self._unit)
        mark = fingerprint(_SCATTER, input_tensor.numel(), dtype_mark(input_tensor.dtype))
        number = progress.enter(Axis.SHARD, mark)
        work: dist.Work | None = _scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        progress.leave(Axis.SHARD, number)
        return work


def record(unit: FSDPModule, progress: Progress, number: int) -> None:
    """Have a unit's collectives noted. number: of the unit on this rank."""
    gather = RecordedGather(progress, number)
    scatter: Any = RecordedScatter(progress, number)
    unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
    unit.set_custom_reduce_scatter(scatter)
    for group in parameter_groups(unit):
        group.wait_for_unshard = gather.noted(group.wait_for_unshard)
