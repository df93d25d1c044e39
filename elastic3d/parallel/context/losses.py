"""The loss of a micro-batch from those of its chunks, and whether it may be found so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from elastic3d.errors import UsageError
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.context.chunks import SEQUENCE, SequenceChunks, tensors
from elastic3d.port import Progress

ROUNDING = 1e-3
"""Relative difference that the order of sums over positions may make."""


def folded(
    losses: Sequence[Sequence[torch.Tensor]],
    chunks: SequenceChunks,
    group: dist.ProcessGroup | None,
    progress: Progress,
) -> list[torch.Tensor]:
    """Return the losses of micro-batches, of each its mean or its (sum, count), on every rank; a collective of a group.

    losses: of this rank's chunks, by micro-batch and turn.
    """
    mine = torch.stack([torch.stack([one.double() for one in turns]) for turns in losses])
    rows = mine.unsqueeze(0)
    if group is not None:
        rows = mine.new_empty(chunks.ranks, *mine.shape)
        number = progress.enter(Axis.CP, fingerprint(0, mine.numel()))
        dist.all_gather(list(rows), mine, group=group)
        progress.leave(Axis.CP, number)
    total = rows[chunks.owner(0), :, 0]
    for chunk in range(1, chunks.count):
        total = total + rows[chunks.owner(chunk), :, chunk // chunks.ranks]
    return list(total / chunks.count if total.dim() == 1 else total)


def check_adds_up(loss_fn: Callable[[Any, Any], torch.Tensor], output: Any, target: Any, size: int) -> None:
    """Refuse a loss that is another one where a sequence is cut; UsageError.

    output, target: of a chunk of so many positions, on which it is tried: as a whole, and in two parts.
    """
    if not any(one.dim() > SEQUENCE and one.shape[SEQUENCE] == size for one in tensors(output)):
        return
    half = size // 2
    sizes = (half, size - half)

    def part(given: Any, first: int, number: int) -> Any:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dim() > SEQUENCE and leaf.shape[SEQUENCE] == size:
                return leaf.detach().narrow(SEQUENCE, first, number)
            return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(cut, given)

    with torch.no_grad():
        whole = loss_fn(part(output, 0, size), part(target, 0, size)).double()
        first, second = (
            loss_fn(part(output, at, number), part(target, at, number)).double()
            for at, number in zip((0, half), sizes, strict=True)
        )
    together = first + second if whole.dim() else (first * sizes[0] + second * sizes[1]) / size
    if bool(whole.isnan().any()) or bool(together.isnan().any()):
        return
    if not torch.allclose(whole, together, rtol=ROUNDING, atol=1e-6):
        raise UsageError(
            f"the loss of a chunk is {whole.tolist()}, and {together.tolist()} from two halves of it: "
            "run.shard(..., chunks=) needs a loss that is computed position by position. Shift targets in the data "
            "set, not in the loss function; and where some positions do not count, return a pair (sum over those that "
            "do, their number)"
        )
