"""Gradients summed over the chunks of a micro-batch's sequence, before they are summed over micro-batches.

Chunks run backward from the last one to the first, and are added in that order, whoever has computed them. With cp
ranks a turn has cp chunks in a row: every rank sends each of the others its piece of the gradient, and adds the pieces
it receives, in the order of ranks, onto what the turns before have left. So rank r of a context group has the sum over
all chunks for every cp-th shard of the data-parallel ranks, those with the numbers d * cp + r, and the ranks with this
r sum them over micro-batches as if there were no chunks. Between nodes a micro-batch sends no more than without them.

With cp ranks and G bytes of gradients, a rank sends (cp - 1) / cp * G in each turn to others of its node, and has
G / cp bytes of sums, in the dtype of the sum, for as long as a micro-batch takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.dtypes import dtype_mark
from elastic3d.parallel.reduction.flat import Flat
from elastic3d.planner.memory import BUCKET
from elastic3d.port import UNRECORDED, Progress

MakeFlat = Callable[[Any, dict[int, str], str], Flat]
"""Makes the vector of one FSDP parameter group, as `Flat` does."""


class ChunkedFlat(Flat):
    """The vector of one unit, whose gradients come chunk by chunk.

    ranks: of the context group, None for one. add: adds rows in order, as a device does.
    """

    bound = BUCKET
    """Bytes of what is sent at once."""

    def __init__(
        self,
        group: Any,
        names: dict[int, str],
        unit: str,
        *,
        ranks: dist.ProcessGroup | None,
        add: Callable[[torch.Tensor, torch.Tensor, bool], None],
        progress: Progress,
    ) -> None:
        super().__init__(group, names, unit)
        self._ranks, self._add, self._progress = ranks, add, progress
        self._size = ranks.size() if ranks is not None else 1
        self.shards = self.rows // self._size
        self._sum: torch.Tensor | None = None

    def add_chunk(self) -> None:
        """Add the gradients of the chunk that was passed back to those of the chunks before; a collective."""
        gradients = super().take(self.computed)
        first = self._sum is None
        total = self._sum
        if total is None:
            total = self._sum = torch.empty(self.shards, self.chunk, dtype=self.dtype, device=self.device)
        width = max(1, self.bound // (self.rows * self.computed.itemsize))
        for start in range(0, self.chunk, width):
            stop = min(self.chunk, start + width)
            pieces = self._exchanged(gradients, start, stop)
            part = total[:, start:stop]
            flat = part.contiguous()
            self._add(flat.view(-1), pieces, first)
            if flat.data_ptr() != part.data_ptr():
                part.copy_(flat)

    def _exchanged(self, gradients: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Return the numbers [start, stop) of the shards that this rank sums, a row for each chunk of the turn."""
        size, wide = self._size, stop - start
        out = torch.empty(self.rows * wide, dtype=self.computed, device=self.device)
        super().fill(out, gradients, start, stop)
        if self._ranks is None:
            return out.view(1, -1)
        sent = out.view(self.shards, size, wide).transpose(0, 1).contiguous()
        pieces = torch.empty_like(sent)
        number = self._progress.enter(Axis.CP, fingerprint(dtype_mark(out.dtype), out.numel()))
        dist.all_to_all_single(pieces.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8), group=self._ranks)
        self._progress.leave(Axis.CP, number)
        return pieces.view(size, -1)

    def take(self, wire: torch.dtype, *, rounds: bool = False) -> list[torch.Tensor]:
        """Add the last chunk's gradients; return the sums of all of them, a row for each shard that they are of."""
        self.add_chunk()
        total, self._sum = self._sum, None
        assert total is not None
        return [total]

    def fill(self, into: torch.Tensor, gradients: Sequence[torch.Tensor], start: int, stop: int) -> None:
        """Write the numbers [start, stop) of every shard's sums, one shard after the other."""
        into.view(self.shards, stop - start).copy_(gradients[0][:, start:stop])

    def drop(self) -> None:
        """Forget the sums over chunks: the passes are made again."""
        self._sum = None


def chunked(
    ranks: dist.ProcessGroup | None,
    add: Callable[[torch.Tensor, torch.Tensor, bool], None],
    progress: Progress = UNRECORDED,
) -> MakeFlat:
    """Return what makes the vectors of units where sequences are cut into chunks. ranks: of the context group."""
    return functools.partial(ChunkedFlat, ranks=ranks, add=add, progress=progress)
