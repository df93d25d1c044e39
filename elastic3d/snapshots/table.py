"""Where each box lies in a snapshot: shards as the trainer laid them out, and the tiles they are cut into.

Tables change only with the layout, so each is sent once, without its tiles, and then named by its identity: how it is
cut follows from it, and everyone who has it works that out alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import gt

from checkpointing.format import grid
from checkpointing.format.fields import LARGEST_TILE
from checkpointing.format.tiles import Box, TensorSpec

ALIGNMENT = 64
DIGEST_DIGITS = 64
RUN_BYTES = 4 << 20
MOST_ENTRIES = 1 << 20
"""The most boxes that a received table of one rank's snapshot may have."""

MOST_TILES = 1 << 22
"""Tiles of one rank's snapshot, likewise: a TiB in the smallest that a grid cuts a tensor into."""


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


@dataclass(frozen=True, kw_only=True)
class SnapshotTable:
    """All boxes of a snapshot as the trainer gave them, and the tiles they are cut into, on the grid of checkpoints.

    A tile is what is digested, fetched, replicated and uploaded: nothing cuts a snapshot's bytes in another way.
    Compared by what was given; `tiles` and `runs` are worked out on first use, which takes a while where there are
    many, and kept.
    """

    entries: tuple[BoxExtent, ...]
    """Each box, by offset."""
    nbytes: int
    """Bytes of the snapshot."""
    tile_bytes: int
    """The most bytes of a tile."""
    identity: str
    """Digest of all that, in hex."""

    @cached_property
    def tiles(self) -> tuple[BoxExtent, ...]:
        """The tiles, by offset."""
        return tuple(
            BoxExtent(spec=entry.spec, box=box, offset=offset)
            for entry in self.entries
            for box, offset, _ in cut(entry, self.tile_bytes)
        )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tiles each box has, without making them."""
        return tuple(max(1, grid.count(entry.spec, entry.box, self.tile_bytes)) for entry in self.entries)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Half-open runs of tiles that lie together in at least `RUN_BYTES`, the last one excepted.

        A run is hashed, sent and received in one piece, so that a thousand small tiles do not cost a thousand calls.
        """
        return tuple(_runs(self.tiles, RUN_BYTES))


def lay_out(boxes: Iterable[tuple[TensorSpec, Box]], tile_bytes: int = grid.TILE_BYTES) -> SnapshotTable:
    """Return a table with each box at the next aligned offset."""
    entries, offset = [], 0
    for spec, box in boxes:
        entry = BoxExtent(spec=spec, box=box, offset=offset)
        entries.append(entry)
        offset = -(-(offset + entry.nbytes) // ALIGNMENT) * ALIGNMENT
    return _table(entries, offset, tile_bytes)


def cut(entry: BoxExtent, tile_bytes: int) -> Iterator[tuple[Box, int, int]]:
    """Yield the box, offset and length of each tile of a box; a box without bytes is one of its own."""
    offset, itemsize = entry.offset, entry.spec.itemsize
    if not entry.nbytes:
        yield entry.box, offset, 0
    for box in grid.boxes(entry.spec, entry.box, tile_bytes):
        nbytes = box.numel * itemsize
        yield box, offset, nbytes
        offset += nbytes


def _runs(tiles: Sequence[BoxExtent], least: int) -> Iterator[tuple[int, int]]:
    first, size = 0, 0
    for index, tile in enumerate(tiles):
        size += tile.nbytes
        if size >= least:
            yield first, index + 1
            first, size = index + 1, 0
    if first < len(tiles):
        yield first, len(tiles)


def to_wire(table: SnapshotTable) -> dict[str, object]:
    """Return the table as plain JSON data."""
    return {
        "identity": table.identity,
        "nbytes": table.nbytes,
        "tile_bytes": table.tile_bytes,
        "entries": [[e.spec.key, e.spec.dtype, e.spec.shape, e.box.start, e.box.stop, e.offset] for e in table.entries],
    }


def from_wire(data: dict[str, object]) -> SnapshotTable:
    """Return the table that `to_wire` wrote; ValueError or TypeError for anything else.

    All of it is checked: each box must lie within its tensor and after the previous box, the bytes must be those of the
    boxes, and the identity that of the whole table.
    """
    rows, nbytes, tile_bytes = data["entries"], data["nbytes"], data["tile_bytes"]
    if not isinstance(rows, list) or type(nbytes) is not int or type(tile_bytes) is not int:
        raise ValueError("not a table of a snapshot")
    if len(rows) > MOST_ENTRIES:
        raise ValueError(f"a table of {len(rows)} boxes; {MOST_ENTRIES} are the most")
    if not 1 <= tile_bytes <= LARGEST_TILE:
        raise ValueError(f"a table in tiles of {tile_bytes} bytes; they have 1 to {LARGEST_TILE}")
    entries, end = [], 0
    for key, dtype, shape, start, stop, offset in rows:
        box = Box(start=_dims(start), stop=_dims(stop))
        entry = BoxExtent(spec=TensorSpec(key=str(key), dtype=str(dtype), shape=_dims(shape)), box=box, offset=offset)
        if len(box.stop) != len(entry.spec.shape) or any(map(gt, box.stop, entry.spec.shape)):
            raise ValueError(f"box {key} {box} lies outside its tensor of shape {entry.spec.shape}")
        if type(offset) is not int or offset < end:
            raise ValueError(f"box {key} {box} lies over the one before")
        end = offset + entry.nbytes
        if end > nbytes:
            raise ValueError(f"box {key} {box} lies outside its snapshot")
        entries.append(entry)
    if nbytes - end >= ALIGNMENT:
        raise ValueError(f"a snapshot of {nbytes} bytes, of which boxes take {end}")
    table = _table(entries, nbytes, tile_bytes)
    if sum(table.counts) > MOST_TILES:
        raise ValueError(f"a table of more than {MOST_TILES} tiles")
    if table.identity != data["identity"]:
        raise ValueError("a table under another identity than its own")
    return table


def split_digests(table: SnapshotTable, digits: str) -> tuple[str, ...]:
    """Return the digests of each box's tiles, from those of all of them in one text.

    ValueError for too many or few, and for anything but lower-case hexadecimal digits.
    """
    if bytes.fromhex(digits).hex() != digits:
        raise ValueError("digests that are not hexadecimal digits")
    digests_of, at = [], 0
    for count in table.counts:
        size = count * DIGEST_DIGITS
        digests_of.append(digits[at : at + size])
        at += size
    if len(digits) != at:
        raise ValueError(f"{at // DIGEST_DIGITS} tiles, and digests of {len(digits)} digits")
    return tuple(digests_of)


def _dims(data: Sequence[int]) -> tuple[int, ...]:
    dims = tuple(data)
    if any(type(size) is not int for size in dims):
        raise ValueError(f"not the dims of a tensor: {str(dims)[:80]}")
    return dims


def _table(entries: Sequence[BoxExtent], nbytes: int, tile_bytes: int) -> SnapshotTable:
    rows = [[e.spec.key, e.spec.dtype, e.spec.shape, e.box.start, e.box.stop, e.offset] for e in entries]
    identity = hashlib.blake2b(json.dumps([tile_bytes, rows]).encode(), digest_size=16).hexdigest()
    return SnapshotTable(entries=tuple(entries), nbytes=nbytes, tile_bytes=tile_bytes, identity=identity)
