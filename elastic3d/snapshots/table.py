"""Where each box lies in a snapshot: shards as the trainer laid them out, cut into tiles as others fetch them.

Tables change only with the layout, so that each is sent and cut once and then named by its identity.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import gt

from checkpointing.format.tiles import Box, TensorSpec

ALIGNMENT = 64
TILE_BYTES = 4 << 20
MOST_ENTRIES = 1 << 20
"""The most boxes that a received table of one rank's snapshot may have."""


class UnknownTable(KeyError):
    """No table of this identity is known; send it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxExtent:
    """The bytes of one box, C-contiguous at `offset` of a snapshot."""

    spec: TensorSpec
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.box.numel * self.spec.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTable:
    """All boxes of a snapshot, by offset, and its size in bytes."""

    entries: tuple[BoxExtent, ...]
    nbytes: int
    identity: str


def lay_out(boxes: Iterable[tuple[TensorSpec, Box]]) -> SnapshotTable:
    """Return a table with each box at the next aligned offset."""
    entries, offset = [], 0
    for spec, box in boxes:
        entry = BoxExtent(spec=spec, box=box, offset=offset)
        entries.append(entry)
        offset = -(-(offset + entry.nbytes) // ALIGNMENT) * ALIGNMENT
    return _table(entries, offset)


def cut(table: SnapshotTable, limit: int = TILE_BYTES) -> SnapshotTable:
    """Return the same bytes in tiles of at most `limit` bytes, or of one row where a row is larger.

    A trainer of another layout then fetches little more than the rows it needs.
    """
    tiles: list[BoxExtent] = []
    for entry in table.entries:
        tiles.extend(_rows(entry, limit))
    return _table(tiles, table.nbytes)


def _rows(entry: BoxExtent, limit: int) -> Iterable[BoxExtent]:
    box = entry.box
    if entry.nbytes <= limit or not box.shape or box.shape[0] < 2:
        return [entry]
    row = math.prod(box.shape[1:]) * entry.spec.itemsize
    rows = max(1, limit // row)
    # Cuts are at multiples of the global row, so that ranks with the same rows have the same tiles.
    edges = [box.start[0], *range((box.start[0] // rows + 1) * rows, box.stop[0], rows), box.stop[0]]
    return [
        BoxExtent(
            spec=entry.spec,
            box=Box(start=(low, *box.start[1:]), stop=(high, *box.stop[1:])),
            offset=entry.offset + (low - box.start[0]) * row,
        )
        for low, high in itertools.pairwise(edges)
    ]


def groups(table: SnapshotTable, limit: int = TILE_BYTES) -> list[tuple[int, int]]:
    """Return half-open runs of consecutive tiles with at least `limit` bytes each, if there are that many.

    A run is hashed, sent and received in one piece, so that a thousand small tiles do not cost a thousand calls.
    """
    runs, first, size = [], 0, 0
    for index, entry in enumerate(table.entries):
        size += entry.nbytes
        if size >= limit:
            runs.append((first, index + 1))
            first, size = index + 1, 0
    if first < len(table.entries):
        runs.append((first, len(table.entries)))
    return runs


def to_wire(table: SnapshotTable) -> dict[str, object]:
    """Return the table as plain JSON data."""
    return {
        "identity": table.identity,
        "nbytes": table.nbytes,
        "entries": [[e.spec.key, e.spec.dtype, e.spec.shape, e.box.start, e.box.stop, e.offset] for e in table.entries],
    }


def from_wire(data: dict[str, object]) -> SnapshotTable:
    """Return the table that `to_wire` wrote; ValueError or TypeError for anything else.

    All of it is checked: each box must lie within its tensor and after the previous box, the bytes must be those of the
    boxes, and the identity that of the whole table.
    """
    rows, nbytes = data["entries"], data["nbytes"]
    if not isinstance(rows, list) or type(nbytes) is not int:
        raise ValueError("not a table of tiles")
    if len(rows) > MOST_ENTRIES:
        raise ValueError(f"a table of {len(rows)} tiles; {MOST_ENTRIES} are the most")
    entries, end = [], 0
    for key, dtype, shape, start, stop, offset in rows:
        box = Box(start=_dims(start), stop=_dims(stop))
        entry = BoxExtent(spec=TensorSpec(key=str(key), dtype=str(dtype), shape=_dims(shape)), box=box, offset=offset)
        if len(box.stop) != len(entry.spec.shape) or any(map(gt, box.stop, entry.spec.shape)):
            raise ValueError(f"tile {key} {box} lies outside its tensor of shape {entry.spec.shape}")
        if type(offset) is not int or offset < end:
            raise ValueError(f"tile {key} {box} lies over the one before")
        end = offset + entry.nbytes
        if end > nbytes:
            raise ValueError(f"tile {key} {box} lies outside its snapshot")
        entries.append(entry)
    if nbytes - end >= ALIGNMENT:
        raise ValueError(f"a snapshot of {nbytes} bytes, of which tiles take {end}")
    table = _table(entries, nbytes)
    if table.identity != data["identity"]:
        raise ValueError("a table under another identity than its own")
    return table


def _dims(data: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(data)
    if any(type(size) is not int for size in dims):
        raise ValueError(f"not the dims of a tensor: {str(dims)[:80]}")
    return dims


def _table(entries: Sequence[BoxExtent], nbytes: int) -> SnapshotTable:
    named = json.dumps([[e.spec.key, e.spec.dtype, e.spec.shape, e.box.start, e.box.stop, e.offset] for e in entries])
    identity = hashlib.blake2b(named.encode(), digest_size=16).hexdigest()
    return SnapshotTable(entries=tuple(entries), nbytes=nbytes, identity=identity)
