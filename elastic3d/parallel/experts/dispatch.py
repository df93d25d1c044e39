"""Sends tokens to the ranks that own their experts, and back, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.experts.layer import by_expert, weighted
from elastic3d.port import UNRECORDED, Progress

_COUNTS, _ROWS = 1, 2

Run = Callable[[torch.Tensor, list[int]], torch.Tensor]


class _Exchange(torch.autograd.Function):
    """Sends rows to other ranks; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        progress: Progress,
    ) -> torch.Tensor:
        ctx.way = (received, sent, group, progress)
        return _exchanged(rows, sent, received, group, progress)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _exchanged(gradient, *ctx.way), None, None, None, None


class Dispatch:
    """Replaces the forward of an experts module. run: computes this rank's experts on rows sorted by expert.

    All ranks of the group must call it equally often and in the same order, and run backward through it.
    """

    def __init__(self, run: Run, *, experts: int, group: dist.ProcessGroup, progress: Progress = UNRECORDED) -> None:
        assert experts % group.size() == 0
        self._run, self._experts, self._group, self._progress = run, experts, group, progress

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, wherever these are."""
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # A rank without tokens for its own experts must run backward through the exchange all the same.
            hidden = hidden.detach().requires_grad_()
        ranks = self._group.size()
        order, counts = by_expert(index, self._experts)
        theirs = torch.empty_like(counts)
        number = self._progress.enter(Axis.DP, fingerprint(_COUNTS, counts.numel()))
        dist.all_to_all_single(theirs, counts, group=self._group)
        self._progress.leave(Axis.DP, number)
        theirs = theirs.view(ranks, -1)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        rows = hidden.index_select(0, order // index.shape[1])
        arrived = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, sent, received, self._group, self._progress
        )
        # Rows arrive by rank and, within a rank, by expert.
        numbers = torch.arange(theirs.shape[1], device=theirs.device).repeat(ranks)
        sort = numbers.repeat_interleave(theirs.reshape(-1)).argsort(stable=True)
        made = self._run(arrived.index_select(0, sort), theirs.sum(0).tolist())
        unsorted = torch.empty_like(sort).index_copy(0, sort, torch.arange(len(sort), device=sort.device))
        back = _Exchange.apply(  # type: ignore[no-untyped-call]
            made.index_select(0, unsorted), received, sent, self._group, self._progress
        )
        return weighted(hidden, back, order, weights)


def _exchanged(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, progress: Progress
) -> torch.Tensor:
    rows = rows.contiguous()
    out = rows.new_empty(sum(received), rows.shape[1])
    # As bytes: they are moved, not computed with, and gloo does not know every dtype.
    # How many rows go where depends on the data, and is another number on each rank.
    number = progress.enter(Axis.DP, fingerprint(_ROWS, rows.shape[1], rows.itemsize))
    dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), received, sent, group=group)
    progress.leave(Axis.DP, number)
    return out
