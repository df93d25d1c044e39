"""The norm of the whole gradient, and clipping by it, with bits that do not depend on the layout.

Each rank sums the squares of its rows, which have places in the step vote; the vote adds them in a fixed order.

A row of a parameter is one index of its dim 0. Where tensor parallelism cuts another dim, each of its ranks has a part
of every row, and a place of its own for it; rows that its ranks hold whole are counted once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from elastic3d.parallel.state import box_of, copied_on, local

NORM_EPSILON = 1e-6
"""The same value as in torch.nn.utils.clip_grad_norm_."""

CHUNK = 1 << 22
"""Elements squared in float64 at one time."""

JOINED = 1 << 15
"""Elements of several gradients squared at one time on the CPU, where more would not stay in its cache."""


def places(parameters: Iterable[tuple[str, int]], cut: Mapping[str, int], tp: int) -> tuple[tuple[str, int], ...]:
    """Return how many places each (name, rows) of the parameters has. cut: dims that tp cuts, by name."""
    return tuple((name, rows * tp if cut.get(name) else rows) for name, rows in parameters)


def squares(model: nn.Module, cut: Mapping[str, int], tp: int) -> dict[str, tuple[int, torch.Tensor]]:
    """Return this rank's sums of squares by parameter, each with its first place. tp: this rank's number on that axis.

    Gradients must be those of the step, one kind of shard with their parameters.
    """
    begins, gradients = {}, []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None or copied_on(gradient):
            continue
        start = box_of(gradient).start
        first = start[0] if start else 0
        if cut.get(name):
            first += tp * parameter.shape[0]
        begins[name] = first
        gradients.append(local(gradient))
    return dict(zip(begins, zip(begins.values(), row_squares(gradients), strict=True), strict=True))


def row_squares(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return for each gradient the sum of squares of each row of dim 0, in float64, where the gradient is.

    A row's bits do not depend on the rows beside it. So rows of one length are summed together, whichever gradient they
    are of: a device has a queue of operations for each length then, and not for each parameter.
    """
    sums = [gradient.new_zeros(gradient.shape[:1], dtype=torch.float64) for gradient in gradients]
    lengths: dict[int, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient.numel():
            lengths.setdefault(gradient[0].numel() if gradient.dim() else 1, []).append(index)
    for length, indices in lengths.items():
        matrices = [gradients[index].detach().reshape(-1, length) for index in indices]
        most = max(1, CHUNK // length)
        joined = min(most, JOINED // length) if matrices[0].is_cpu else most
        folded = torch.cat([fold(_squared(batch)) for batch in _batches(matrices, most, joined)])
        for index, rows in zip(indices, torch.split(folded, [len(matrix) for matrix in matrices]), strict=True):
            sums[index] = rows
    return sums


def _batches(matrices: Iterable[torch.Tensor], most: int, joined: int) -> Iterator[list[torch.Tensor]]:
    """Yield their rows in order: in single matrices of at most `most`, or several that have at most `joined`."""
    batch: list[torch.Tensor] = []
    rows = 0
    for part in itertools.chain.from_iterable(torch.split(matrix, most) for matrix in matrices):
        if batch and rows + len(part) > joined:
            yield batch
            batch, rows = [], 0
        batch.append(part)
        rows += len(part)
    yield batch


def _squared(matrices: list[torch.Tensor]) -> torch.Tensor:
    rows = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    return rows.to(torch.float64, copy=True).square_()


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
    several = list(gradients)
    if coefficient != 1.0 and several:
        torch._foreach_mul_(several, coefficient)
