"""Where tiles are cut: on a grid fixed in global coordinates (format.md, section 2)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from checkpointing.format.tiles import Box, Piece, TensorSpec

TILE_BYTES = 4 << 20
"""Bytes of the largest tile, by default: worth a request of its own."""

SMALL_BYTES = 256 << 10
"""Bytes of a tile that is not cut further: below this its description costs more than reading it needlessly, and
hashing it a third more a byte (at 64 KiB; at this size it costs what it does at 4 MiB)."""

PARTS = 64
"""Number of tiles that a tensor is cut into where it could have fewer: a reader under another layout takes whole tiles,
and at the two edges of its shard reads some of them needlessly."""


def largest(spec: TensorSpec, tile_bytes: int = TILE_BYTES) -> int:
    """Return how many bytes a tile of the tensor may have, where no tile of any has more than `tile_bytes`."""
    return _limit(math.prod(spec.shape) * spec.itemsize, tile_bytes)


def steps(spec: TensorSpec, tile_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """Return the grid's step along each dim up to the one that is cut last; later dims are not cut."""
    row = math.prod(spec.shape) * spec.itemsize
    limit = _limit(row, tile_bytes)
    for dim, size in enumerate(spec.shape):
        row //= max(1, size)
        if row <= limit:
            return (1,) * dim + (max(1, limit // max(1, row)),)
    return ()


def _limit(nbytes: int, tile_bytes: int) -> int:
    return min(tile_bytes, max(SMALL_BYTES, nbytes // PARTS))


def count(spec: TensorSpec, box: Box, tile_bytes: int = TILE_BYTES) -> int:
    """Return how many tiles `boxes` yields, without making them."""
    if not box.numel:
        return 0
    grid = steps(spec, tile_bytes)
    return math.prod(-(-b // step) - a // step for a, b, step in zip(box.start, box.stop, grid, strict=False))


def boxes(spec: TensorSpec, box: Box, tile_bytes: int = TILE_BYTES, *, together: int = 1) -> Iterator[Box]:
    """Yield the boxes that the grid cuts `box` into, in the order of their start; none for an empty one.

    Their bytes follow one another in those of `box`. With `together`, up to so many neighbours stay in one box where
    the grid allows it.
    """
    if not box.numel:
        return
    grid = steps(spec, tile_bytes)
    if grid:
        grid = (*grid[:-1], grid[-1] * together)
    edges = [
        [a, *range((a // step + 1) * step, b, step), b] for a, b, step in zip(box.start, box.stop, grid, strict=False)
    ]
    rest_start, rest_stop = box.start[len(grid) :], box.stop[len(grid) :]
    # All dims before the last one cut have length 1, so the boxes follow one another in memory.
    starts = itertools.product(*(edge[:-1] for edge in edges))
    stops = itertools.product(*(edge[1:] for edge in edges))
    for start, stop in zip(starts, stops, strict=True):
        yield Box(start=start + rest_start, stop=stop + rest_stop)


def check(piece: Piece) -> None:
    """Accept a piece whose box is in its tensor and whose bytes are its box's; ValueError."""
    spec, box = piece.spec, piece.box
    if len(box.start) != len(spec.shape) or any(b > n for b, n in zip(box.stop, spec.shape, strict=True)):
        raise ValueError(f"{spec.key}: {box} is not in a tensor of shape {spec.shape}")
    nbytes = box.numel * spec.itemsize
    if piece.data.nbytes != nbytes or not piece.data.c_contiguous:
        raise ValueError(f"{spec.key}: {box} of {spec.dtype} takes {nbytes} contiguous bytes, not {piece.data.nbytes}")


def cut(piece: Piece, tile_bytes: int = TILE_BYTES) -> Iterator[Piece]:
    """Yield the tiles of a piece, as views of its bytes, in the order of their start; ValueError as `check` has it."""
    check(piece)
    data = piece.data.cast("B") if piece.data.nbytes else piece.data
    offset = 0
    for tile in boxes(piece.spec, piece.box, tile_bytes):
        nbytes = tile.numel * piece.spec.itemsize
        yield Piece(spec=piece.spec, box=tile, data=data[offset : offset + nbytes])
        offset += nbytes
