"""The norm of the whole gradient, and clipping by it, with bits that do not depend on the layout.

Each rank sums the squares of its rows, which have places in the step vote; the vote adds them in a fixed order.

A row of a parameter is one index of its dim 0. Where tensor parallelism cuts another dim, each of its ranks has a part
of every row, and a place of its own for it; rows that its ranks hold whole are counted once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from elastic3d.parallel.state import box_of, copied_on, local

NORM_EPSILON = 1e-6
"""The same value as in torch.nn.utils.clip_grad_norm_."""

CHUNK = 1 << 22
"""Elements squared in float64 at one time."""


def places(parameters: Iterable[tuple[str, int]], cut: Mapping[str, int], tp: int) -> tuple[tuple[str, int], ...]:
    """Return how many places each (name, rows) of the parameters has. cut: dims that tp cuts, by name."""
    return tuple((name, rows * tp if cut.get(name) else rows) for name, rows in parameters)


def squares(model: nn.Module, cut: Mapping[str, int], tp: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Return this rank's sums of squares by parameter, each with its first place. tp: this rank's number on that axis.

    Gradients must be those of the step, one kind of shard with their parameters.
    """
    sums = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or copied_on(gradient):
            continue
        start = box_of(gradient).start
        first = start[0] if start else 0
        if cut.get(name):
            first += tp * parameter.shape[0]
        sums[name] = (first, row_squares(local(gradient)))
    return sums


def row_squares(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of dim 0, in float64; a row's bits do not depend on the rows beside it."""
    if not gradient.numel():
        return torch.zeros(gradient.shape[0], dtype=torch.float64)
    rows = gradient.detach().reshape(gradient.shape[0] if gradient.dim() else 1, -1)
    at_once = max(1, CHUNK // rows.shape[1])
    return torch.cat([fold(part.to(torch.float64, copy=True).square_()) for part in torch.split(rows, at_once)])


def fold(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of each row of a matrix, halving it elementwise; overwrites `values`.

    Only elementwise additions are made, in an order that depends on the row's length alone, so neither the kernel's
    way of splitting a reduction nor the number of rows or threads can show in the bits.
    """
    length = values.shape[1]
    if not length:
        return values.new_zeros(values.shape[0])
    while length > 1:
        half = length // 2
        values[:, :half] += values[:, length - half : length]
        length -= half
    return values[:, 0].clone()


def norm(rows: torch.Tensor) -> float:
    """Return the norm of what has these sums of squares of its rows, all of them in the vote's order."""
    return math.sqrt(float(fold(rows.unsqueeze(0).clone())[0]))


def clip_coefficient(norm: float, clip: float) -> float:
    """Return the factor that brings a gradient of this norm down to `clip`; 1.0 if it is below."""
    return min(1.0, clip / (norm + NORM_EPSILON)) if math.isfinite(norm) else norm


def scale(gradients: Iterable[torch.Tensor], coefficient: float) -> None:
    """Multiply gradients in place, elementwise."""
    if coefficient != 1.0:
        for gradient in gradients:
            gradient.mul_(coefficient)
