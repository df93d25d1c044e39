"""The layout of tiles in a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.tiles import Box, TensorSpec, uncovered
from elastic3d.snapshots import table as tables


def spec(*shape: int, key: str = "model/w", dtype: str = "float32") -> TensorSpec:
    """A tensor."""
    return TensorSpec(key=key, dtype=dtype, shape=shape)


@given(rows=st.integers(0, 40), columns=st.integers(1, 8), low=st.integers(0, 40), limit=st.integers(1, 400))
def test_cutting_covers_the_shard_in_place(rows: int, columns: int, low: int, limit: int) -> None:
    """Tiles cover the shard without a gap, each at the offset its first row has in the shard."""
    whole = spec(low + rows, columns)
    table = tables.lay_out([(whole, Box(start=(low, 0), stop=(low + rows, columns)))])
    cut = tables.cut(table, limit)
    at = low
    for entry in cut.entries:
        assert entry.box.start == (at, 0)
        assert entry.offset == (at - low) * columns * 4
        assert entry.nbytes <= max(limit, columns * 4)
        at = entry.box.stop[0]
    assert at == low + rows
    assert cut.nbytes == table.nbytes


def test_shards_of_two_layouts_are_cut_at_the_same_rows() -> None:
    """The cuts are those of the global tensor, not of the shard."""
    whole = spec(100, 10)
    first = tables.cut(tables.lay_out([(whole, Box(start=(0, 0), stop=(100, 10)))]), 400)
    second = tables.cut(tables.lay_out([(whole, Box(start=(33, 0), stop=(100, 10)))]), 400)
    assert {e.box for e in second.entries} - {e.box for e in first.entries} == {Box(start=(33, 0), stop=(40, 10))}


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
    """With the same identity."""
    table = tables.cut(tables.lay_out([(spec(9, 9), Box(start=(3, 0), stop=(9, 9)))]), 100)
    assert tables.from_wire(tables.to_wire(table)) == table


def test_a_tile_outside_its_snapshot_is_refused() -> None:
    """Nobody can make a server read beyond the snapshot."""
    wire = tables.to_wire(tables.lay_out([(spec(4), Box(start=(0,), stop=(4,)))]))
    with pytest.raises(ValueError, match="outside"):
        tables.from_wire({**wire, "nbytes": 8})


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 400))
def test_runs_are_all_tiles_in_order(sizes: list[int], limit: int) -> None:
    """Each tile is in exactly one run."""
    table = tables.lay_out(
        [(spec(size, key=f"model/{i}"), Box(start=(0,), stop=(size,))) for i, size in enumerate(sizes)]
    )
    runs = tables.groups(table, limit)
    assert [index for first, stop in runs for index in range(first, stop)] == list(range(len(sizes)))
