"""The norm of the whole gradient, and clipping by it, with bits that do not depend on the layout.

Each rank sums the squares of its rows, which have places in the step vote; the vote adds them in a fixed order.

A row of a parameter is one index of its dim 0. Where tensor parallelism cuts another dim, each of its ranks has a part
of every row, and a place of its own for it; rows that its ranks hold whole are counted once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from elastic3d.devices import ComputeDevice
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


EMPTY = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSquares:
    """Sums of the squares of rows. places: of each gradient its name, its first row and the number of its rows.

    values: of all of them, in this order, in float64.
    """

    places: tuple[tuple[str, int, int], ...] = ()
    values: torch.Tensor = EMPTY


class Squares:
    """This rank's part of a norm, asked for in each step. cut: dims that tp cuts, by name. tp: number on that axis.

    Gradients must be those of the step, one kind of shard with their parameters.
    """

    def __init__(self, model: nn.Module, cut: Mapping[str, int], tp: int, device: ComputeDevice) -> None:
        self._device = device
        self._held: list[tuple[str, nn.Parameter, int]] = []
        for name, parameter in model.named_parameters():
            if copied_on(parameter):
                continue
            start = box_of(parameter).start
            first = start[0] if start else 0
            self._held.append((name, parameter, first + (tp * parameter.shape[0] if cut.get(name) else 0)))

    def now(self) -> RowSquares:
        """Return the sums of squares of what the step's gradients are now, where they are."""
        parts = [(name, local(one.grad), first) for name, one, first in self._held if one.grad is not None]
        if not parts:
            return RowSquares()
        places = tuple((name, first, part.shape[0] if part.dim() else 1) for name, part, first in parts)
        return RowSquares(places=places, values=row_squares([part for _, part, _ in parts], self._device))


@torch.no_grad()
def row_squares(gradients: Sequence[torch.Tensor], device: ComputeDevice) -> torch.Tensor:
    """Return the sums of squares of the rows of dim 0 of all gradients, in order, in float64, where they are.

    A row's bits do not depend on the rows beside it. So rows of one length are summed together, whichever gradient they
    are of: a device has a queue of operations for each length then, and not for each parameter.
    """
    sums: list[torch.Tensor] = [EMPTY] * len(gradients)
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        numbers, shape = gradient.numel(), gradient.shape
        if numbers:
            alike.setdefault((numbers // shape[0] if shape else 1, gradient.dtype), []).append(index)
        else:
            sums[index] = gradient.new_zeros(shape[:1], dtype=torch.float64)
    for (length, _), indices in alike.items():
        matrices = [gradients[index].reshape(-1, length) for index in indices]
        folded = device.square_rows(matrices, fold)
        if folded is None:
            folded = _folded(matrices, length)
        for index, rows in zip(indices, torch.split(folded, [matrix.shape[0] for matrix in matrices]), strict=True):
            sums[index] = rows
    return torch.cat(sums) if sums else EMPTY


def _folded(matrices: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    most = max(1, CHUNK // length)
    joined = min(most, JOINED // length) if matrices[0].is_cpu else most
    return torch.cat([fold(_squared(batch)) for batch in _batches(matrices, most, joined)])


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
