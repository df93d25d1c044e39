"""The squared norm of the gradient of each leaf of micro-batches, with bits that do not depend on the layout.

They are taken from whole gradients, before these are sent: of a parameter the norms of its rows, and of these their
norm, which depend on its shape, the kind of device and the number of threads, and on nothing else. A block's
parameters, which no layout parts, are added up in their order and have one place in the step vote for each leaf; a
parameter that is in no block has its own. Where tensor parallelism cuts parameters, each of its ranks has places of its
own, for its parts.

Rows are summed in fp32, which is enough for a noise scale, and costs half of what copying the gradients costs: the
norm's own sums in float64 cost thirty times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastic3d.parallel import norms
from elastic3d.parallel.state import is_copy


class LeafPlaces:
    """Where squares stand in a vote: for each leaf one place for each group of parameters and rank of the tensor axis.

    names: of all parameters of the model, in order. blocks: dotted path of its blocks, None for none.
    """

    def __init__(self, names: Sequence[str], blocks: str | None, tp: int) -> None:
        self.order = {name: number for number, name in enumerate(names)}
        groups: dict[str, int] = {}
        self.groups = {name: groups.setdefault(_group(name, blocks), len(groups)) for name in names}
        self.tp = tp
        self.width = len(groups) * tp
        """Places of one leaf."""

    def fold(self, places: torch.Tensor) -> tuple[float, ...]:
        """Return the squared norm of each leaf, of all places of all leaves."""
        return tuple(norms.fold(places.view(-1, self.width).clone()).tolist())


class LeafSquares:
    """What one rank measures of its leaves in a step. place: this rank's number on the tensor axis."""

    def __init__(self, model: nn.Module, places: LeafPlaces, place: int) -> None:
        self._places, self._place = places, place
        self._copies = {name for name, parameter in model.named_parameters() if is_copy(parameter, place)}
        self._leaves: list[tuple[int, list[str]]] = []
        self._sums: list[torch.Tensor] = []

    def clear(self) -> None:
        """Forget what was measured: passes begin, or are made again."""
        self._leaves.clear()
        self._sums.clear()

    @torch.no_grad()
    def add(self, leaf: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Take gradients of some parameters of a leaf, whole but for what tensor parallelism cuts."""
        held = [(name, one) for name, one in zip(names, gradients, strict=True) if name not in self._copies]
        if held:
            self._leaves.append((leaf, [name for name, _ in held]))
            rows = [_lengths(gradient.detach()) for _, gradient in held]
            self._sums.append(torch.stack(torch._foreach_norm(rows)).double().square_())

    @property
    def sums(self) -> list[torch.Tensor]:
        """What was measured, where the gradients are, to be read and given to `placed`."""
        return self._sums

    def placed(self, read: Sequence[torch.Tensor], leaves: int) -> torch.Tensor:
        """Return this rank's places of a step of so many leaves, zeros where others have theirs. read: of `sums`."""
        places, order = self._places, self._places.order
        squares_at: dict[int, list[tuple[int, float]]] = {}
        for (leaf, names), squares in zip(self._leaves, read, strict=True):
            for name, square in zip(names, squares.tolist(), strict=True):
                at = (leaf * places.width) + places.groups[name] * places.tp + self._place
                squares_at.setdefault(at, []).append((order[name], square))
        row = torch.zeros(leaves * places.width, dtype=torch.float64)
        for at, several in squares_at.items():
            row[at] = sum(square for _, square in sorted(several))
        return row


def _group(name: str, blocks: str | None) -> str:
    """Return what has one place: the block that a parameter is in, or the parameter."""
    if blocks is None or not name.startswith(f"{blocks}."):
        return name
    return name[: len(blocks) + 1] + name[len(blocks) + 1 :].partition(".")[0]


def _lengths(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norms of the rows of dim 0, in fp32, where they are; of a vector, its numbers."""
    if gradient.dim() < 2 or not gradient.numel():
        return gradient.reshape(-1).float()
    rows = gradient.reshape(gradient.shape[0], -1)
    lengths: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    return lengths
