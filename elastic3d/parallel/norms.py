"""Squares of gradients, row by row, for the vote: which places they have, so that no layout shows in their sum.

A row of a parameter is one index of its dim 0. Where tensor parallelism cuts another dim, each of its ranks has a part
of every row, and a place of its own for it; what its ranks hold whole is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from elastic3d.parallel.state import box_of, copied_on, local
from elastic3d.parallel.vote import row_squares


def places(parameters: Iterable[tuple[str, int]], cut: Mapping[str, int], tp: int) -> tuple[tuple[str, int], ...]:
    """Return how many places each parameter of so many rows has. cut: dims that tp cuts, by name."""
    return tuple((name, rows * tp if cut.get(name) else rows) for name, rows in parameters)


def squares(model: nn.Module, cut: Mapping[str, int], tp: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Return this rank's sums of squares by parameter, each with its first place. tp: this rank's number on that axis.

    Gradients must be those of the step, one kind of shard with their parameters.
    """
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or copied_on(gradient):
            continue
        start = box_of(gradient).start
        first = start[0] if start else 0
        if cut.get(name):
            first += tp * parameter.shape[0]
        found[name] = (first, row_squares(local(gradient)))
    return found
