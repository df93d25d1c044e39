"""Where tiles are cut: on a grid fixed in global coordinates (format.md, section 2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from checkpointing.format.tiles import Box, Piece, TensorSpec

TILE_BYTES = 4 << 20
"""Bytes of the largest tile: worth a request of its own."""

SMALL_BYTES = 64 << 10
"""Bytes of a tile that is not cut further: below this a tile's description costs more than reading it needlessly."""

PARTS = 64
"""Number of tiles that a tensor is cut into where it could have fewer: a reader under another layout takes whole tiles,
and at the two edges of its shard reads some of them needlessly."""


def largest(spec: TensorSpec) -> int:
    """Return how many bytes a tile of the tensor may have."""
    return min(TILE_BYTES, max(SMALL_BYTES, spec.box.numel * spec.itemsize // PARTS))


def steps(spec: TensorSpec, limit: int | None = None) -> tuple[int, ...]:
    """Return the grid's step along each dim up to the one that is cut last; later dims are not cut."""
    limit = largest(spec) if limit is None else limit
    for dim in range(len(spec.shape)):
        row = math.prod(spec.shape[dim + 1 :]) * spec.itemsize
        if row <= limit:
            return (1,) * dim + (max(1, limit // max(1, row)),)
    return ()


def cut(piece: Piece, limit: int | None = None) -> Iterator[Piece]:
    """Yield the tiles of a piece, as views of its bytes, in the order of their start.

    ValueError if the box is not in the tensor or the bytes are not those of the box.
    """
    spec, box = piece.spec, piece.box
    if len(box.start) != len(spec.shape) or any(b > n for b, n in zip(box.stop, spec.shape, strict=True)):
        raise ValueError(f"{spec.key}: {box} is not in a tensor of shape {spec.shape}")
    nbytes = box.numel * spec.itemsize
    if piece.data.nbytes != nbytes or not piece.data.c_contiguous:
        raise ValueError(f"{spec.key}: {box} of {spec.dtype} takes {nbytes} contiguous bytes, not {piece.data.nbytes}")
    if not nbytes:
        return
    data = piece.data.cast("B")
    grid = steps(spec, limit)
    spans = [
        [(max(low, a), min(low + step, b)) for low in range(a // step * step, b, step)]
        for a, b, step in zip(box.start, box.stop, grid, strict=False)
    ]
    offset = 0
    for corner in itertools.product(*spans):
        tile = Box(
            start=tuple(a for a, _ in corner) + box.start[len(grid) :],
            stop=tuple(b for _, b in corner) + box.stop[len(grid) :],
        )
        # All dims before the last one cut have length 1, so the tiles follow one another in memory.
        nbytes = tile.numel * spec.itemsize
        yield Piece(spec=spec, box=tile, data=data[offset : offset + nbytes])
        offset += nbytes
