"""A part of one unit's sum, kept with all that was added up to it, so that another rank can add it up again.

The whole of a unit's pieces could go to a second rank too, which adds them up beside. That would take a second exchange
in the backward pass, and memory for another sum, to repeat what is by far the smallest part of a device's arithmetic,
and which the same device's passes are audited for. So the rank that adds keeps a bounded part of what arrives, where
`transit` has made sure of it, and sends that on when the passes are over: a message of a known size once in an audited
step, whatever the model. The part is drawn anew each time, so that every number has its turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic3d.health.custody import GRAIN


class FoldSample:
    """What one rank keeps of one unit's sum in one step. draw: which part of it. most: bytes of pieces to be kept."""

    def __init__(self, *, draw: int, most: int) -> None:
        self._draw, self._most = draw, most
        self._at = self._start = self._stop = -1
        self._rows: list[torch.Tensor] = []

    def added(self, parts: Sequence[tuple[int, int]], at: int, rows: torch.Tensor, pieces: int) -> None:
        """Take the rows of pieces that are added to the part of the sum that begins at its `at`-th number.

        parts: where each part of the sum begins, and how many numbers it has. pieces: how many are added in the step.
        """
        if self._at < 0:
            self._choose(parts, width_of(pieces, rows.dtype.itemsize, self._most))
        if at == self._at and rows.shape[1]:
            self._rows.append(rows[:, self._start : self._stop].clone())

    def _choose(self, parts: Sequence[tuple[int, int]], width: int) -> None:
        able = [part for part in parts if part[1]]
        if not able or not width:
            self._at = self._start = self._stop = 0
            return
        self._at, size = able[self._draw % len(able)]
        self._start = self._draw // len(able) % -(-size // width) * width
        self._stop = min(size, self._start + width)

    @property
    def pieces(self) -> torch.Tensor | None:
        """What was added up: a row for each piece, in the order of the additions; None for nothing."""
        return torch.cat(self._rows) if self._rows and self._stop > self._start else None

    def part_of(self, total: torch.Tensor) -> torch.Tensor:
        """Return the part of a rank's sum that they were added up to."""
        return total[self._at + self._start : self._at + self._stop]


def width_of(pieces: int, itemsize: int, most: int) -> int:
    """Return how many numbers of a sum can be added up again from `most` bytes; 0 where its pieces are too many."""
    width = most // (max(1, pieces) * itemsize)
    return width // GRAIN * GRAIN or width
