"""Layers that send each token to a few of many experts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


class Experts(nn.ModuleList):
    """Experts by number, called with a router's choices in the way that transformers calls its own."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        hidden: tokens x width. index, weights: tokens x choices; an index of `len(self)` chooses none. Experts that no
        token chose do not run, and get no gradient.
        """
        order, counts = by_expert(index, len(self))
        rows = hidden.index_select(0, order // index.shape[1])
        return weighted(hidden, self.each(rows, counts.tolist(), range(len(self))), order, weights)

    def each(self, rows: torch.Tensor, counts: list[int], numbers: Iterable[int]) -> torch.Tensor:
        """Return the experts' outputs for rows: the first counts[0] are for the first of the numbers, and so on."""
        parts = zip(numbers, torch.split(rows, counts), strict=True)
        made = [self[number](part) for number, part in parts if part.shape[0]]
        return torch.cat(made) if made else rows


class Top2(nn.Module):
    """A mixture with GShard's router (Lepikhin et al. 2020): two experts per token, each up to its capacity.

    Of a micro-batch of n tokens an expert takes ceil(2 n / experts * capacity), first choices first, then in order of
    tokens; a token that comes too late gets none. Capacity is counted per micro-batch, so that it does not depend on
    the layout. The second choice is always made, where the paper makes it at random.
    """

    def __init__(self, width: int, experts: Iterable[nn.Module], *, capacity: float = 1.25) -> None:
        super().__init__()
        self.experts = Experts(experts)
        self.gate = nn.Linear(width, len(self.experts), bias=False)
        self.capacity = capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x through its experts; the last dim is the width."""
        tokens, number = x.reshape(-1, x.shape[-1]), len(self.experts)
        weights, index = self.gate(tokens).float().softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        room = max(1, math.ceil(2 * tokens.shape[0] / number * self.capacity))
        # First choices of all tokens, then second ones, each numbered among those for the same expert.
        chosen = nn.functional.one_hot(index.t().reshape(-1), number)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1).view(2, -1).t()
        index = torch.where(place < room, index, number)
        out: torch.Tensor = self.experts(tokens, index, weights.to(x.dtype))
        return out.view_as(x)


def by_expert(index: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choices (token * choices + choice) sorted by expert, without empty ones, and each expert's number."""
    flat = index.reshape(-1)
    counts = torch.bincount(flat, minlength=number + 1)[:number]
    return flat.argsort(stable=True)[: int(counts.sum())], counts


def weighted(hidden: torch.Tensor, made: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weighted sum of `made`, the outputs for the choices in `order`."""
    places = made.new_zeros(weights.numel(), hidden.shape[1]).index_copy(0, order, made)
    return (places.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
