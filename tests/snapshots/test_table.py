"""The layout of tiles in a snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import SaveOptions, open_store, save_rank
from checkpointing.format.grid import SMALL_BYTES
from checkpointing.format.manifest import decode_manifest
from checkpointing.format.tiles import Box, Piece, TensorSpec, digest, uncovered
from elastic3d.snapshots import memory
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.offers import OfferedShard, spell_out
from elastic3d.snapshots.table import SnapshotTable


def spec(*shape: int, key: str = "model/w", dtype: str = "float32") -> TensorSpec:
    """A tensor."""
    return TensorSpec(key=key, dtype=dtype, shape=shape)


@given(rows=st.integers(0, 40), columns=st.integers(1, 8), low=st.integers(0, 40), limit=st.integers(4, 400))
def test_cutting_covers_the_shard_in_place(rows: int, columns: int, low: int, limit: int) -> None:
    """Tiles cover the shard without a gap, each at the offset its first element has in the shard."""
    whole = spec(low + rows, columns)
    table = tables.lay_out([(whole, Box(start=(low, 0), stop=(low + rows, columns)))], limit)
    at = 0
    for tile in table.tiles:
        assert tile.offset == at == ((tile.box.start[0] - low) * columns + tile.box.start[1]) * 4
        assert tile.nbytes <= limit
        at += tile.nbytes
    assert at == rows * columns * 4
    assert table.counts == (len(table.tiles),)


def test_shards_of_two_layouts_are_cut_at_the_same_rows() -> None:
    """The cuts are those of the global tensor, not of the shard."""
    whole = spec(100, 10)
    first = tables.lay_out([(whole, Box(start=(0, 0), stop=(100, 10)))], 400)
    second = tables.lay_out([(whole, Box(start=(33, 0), stop=(100, 10)))], 400)
    assert {e.box for e in second.tiles} - {e.box for e in first.tiles} == {Box(start=(33, 0), stop=(40, 10))}


def snapshot(tile_bytes: int) -> tuple[SnapshotTable, memoryview, list[str]]:
    """Return a rank's snapshot of a shard of a large tensor, a small tensor, an empty one and a scalar."""
    boxes = [
        (spec(4096, 300), Box(start=(1000, 0), stop=(3000, 300))),
        (spec(3, 7, key="model/b", dtype="bfloat16"), Box(start=(0, 0), stop=(3, 7))),
        (spec(0, 4, key="model/none"), Box(start=(0, 0), stop=(0, 4))),
        (spec(key="optimizer/w/step"), Box(start=(), stop=())),
    ]
    table = tables.lay_out(boxes, tile_bytes)
    data = memoryview(np.random.default_rng(0).bytes(table.nbytes))
    return table, data, memory.digests(table, data, 0, len(table.tiles))


@pytest.mark.parametrize("tile_bytes", [4 << 20, SMALL_BYTES // 2])
def test_the_tiles_of_a_snapshot_are_those_of_a_checkpoint(tile_bytes: int) -> None:
    """What was cut and digested for the snapshot is stored just as a save of the whole boxes stores it."""
    table, data, digests = snapshot(tile_bytes)
    whole = [
        Piece(spec=one.spec, box=one.box, data=data[one.offset : one.offset + one.nbytes]) for one in table.entries
    ]
    objects = []
    for name, pieces in (("tiles", memory.pieces(table, data, digests)), ("whole", whole)):
        store = open_store(f"memory://grid-{name}-{tile_bytes}")
        save_rank(
            store, step=1, made_in=1, attempt=0, rank=0, world=1, pieces=pieces, facts={},
            options=SaveOptions(tile_bytes=tile_bytes),
        )  # fmt: skip
        objects.append({name: store.get(name) for prefix in ("saves/", "packs/") for name in store.list(prefix)})
    assert objects[0] == objects[1]
    (name,) = (name for name in objects[0] if name.startswith("saves/"))
    there = {(tile.spec, tile.box, tile.digest) for tile in decode_manifest(objects[0][name], name).tiles}
    cut = {
        (tile.spec, tile.box, each_digest)
        for tile, each_digest in zip(table.tiles, digests, strict=True)
        if tile.nbytes
    }
    assert there == cut


def test_the_same_tiles_are_on_offer_as_were_digested() -> None:
    """A shard spelled out has the tiles of the table, and only where it is wanted."""
    table, data, digests = snapshot(SMALL_BYTES)
    offers = [
        OfferedShard(
            spec=entry.spec, box=entry.box, source="a:1", generation=3, step=7, rank=1, offset=entry.offset,
            tile_bytes=table.tile_bytes, digests=each_digest,
        )
        for entry, each_digest in zip(table.entries, tables.split_digests(table, "".join(digests)), strict=True)
    ]  # fmt: skip
    spelled = list(spell_out(offers, [(one.spec, one.box) for one in offers if one.box.numel], ["a:1"]))
    there = [tile for tile in table.tiles if tile.nbytes]
    assert [(tile.spec, tile.box) for tile in spelled] == [(tile.spec, tile.box) for tile in there]
    for tile in spelled:
        *_, offset, nbytes = tile.where
        assert tile.where[:3] == [3, 7, 1]
        assert digest(tile.spec, tile.box, data[offset : offset + nbytes]) == tile.digest
    rows = (spec(4096, 300), Box(start=(0, 0), stop=(1000, 300)))
    assert list(spell_out(offers, [rows], ["a:1"])) == []
    assert {tile.spec.key for tile in spell_out(offers, [(offers[1].spec, offers[1].box)], ["a:1"])} == {"model/b"}
    # What another server holds too is spelled out there where that is preferred, and kept back otherwise.
    both = [replace(one, copies=("b:1",)) for one in offers]
    everything = [(one.spec, one.box) for one in offers if one.box.numel]
    for first, second in (("a:1", "b:1"), ("b:1", "a:1")):
        tiles = spell_out(both, everything, [first, second])
        assert [tile.source for tile in tiles] == [first] * len(spelled)
        assert list(tiles.spare("model/b")) == [
            replace(tile, source=second) for tile in spelled if tile.spec.key == "model/b"
        ]
    with pytest.raises(ValueError, match="digests of"):
        tables.split_digests(table, "".join(digests[1:]))


def test_boxes_of_all_sizes_are_aligned() -> None:
    """Scalars, empty shards and odd sizes: each begins at a multiple of the alignment, and none overlaps the next."""
    boxes = [
        (spec(key="optimizer/w/step"), Box(start=(), stop=())),
        (spec(4, 3), Box(start=(2, 0), stop=(2, 3))),
        (spec(7, dtype="bfloat16"), Box(start=(0,), stop=(7,))),
        (spec(5, 5), Box(start=(0, 0), stop=(5, 5))),
    ]
    table = tables.lay_out(boxes)
    assert [entry.offset % tables.ALIGNMENT for entry in table.entries] == [0, 0, 0, 0]
    assert all(a.offset + a.nbytes <= b.offset for a, b in zip(table.entries, table.entries[1:], strict=False))
    assert uncovered(boxes[3][0], [table.entries[3].box]) is None


def test_a_table_reads_back_unchanged() -> None:
    """With the same identity, and cut alike."""
    table = tables.lay_out([(spec(9, 9), Box(start=(3, 0), stop=(9, 9)))], 100)
    read = tables.from_wire(tables.to_wire(table))
    assert (read, read.tiles) == (table, table.tiles)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"nbytes": 8}, "outside"),
        ({"tile_bytes": 0}, "tiles of 0 bytes"),
        ({"tile_bytes": 1 << 30}, "tiles of"),
        ({"tile_bytes": True}, "not a table"),
        ({"tile_bytes": 48}, "another identity"),
        (
            {"nbytes": 1 << 40, "entries": [["w", "float32", [1 << 38], [0], [1 << 38], 0]], "tile_bytes": 4},
            f"more than {tables.MOST_TILES} tiles",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused(changed: dict[str, Any], why: str) -> None:
    """Nobody can make a server read beyond the snapshot, or list more tiles than there is memory for."""
    wire = tables.to_wire(tables.lay_out([(spec(4), Box(start=(0,), stop=(4,)))]))
    with pytest.raises(ValueError, match=why):
        tables.from_wire({**wire, **changed})


@given(st.lists(st.integers(0, 50), max_size=30))
def test_runs_are_all_tiles_in_order(sizes: list[int]) -> None:
    """Each tile is in exactly one run."""
    table = tables.lay_out(
        [
            (spec(size, 1 << 16, key=f"model/{i}"), Box(start=(0, 0), stop=(size, 1 << 16)))
            for i, size in enumerate(sizes)
        ]
    )
    runs = [table.tiles[first:stop] for first, stop in table.runs]
    assert [tile for run in runs for tile in run] == list(table.tiles)
    assert all(sum(tile.nbytes for tile in run) >= tables.RUN_BYTES for run in runs[:-1])
