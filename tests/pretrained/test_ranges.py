"""Boxes are read out of files whichever way they are cut, and no more of the files than that."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointing.errors import ForeignFormat
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange import ranges
from checkpointing.interchange.foreign import Stored
from checkpointing.interchange.ranges import FileRanges


def stored(folder: Path, shape: tuple[int, ...], dtype: str = "int32", offset: int = 7) -> tuple[Stored, np.ndarray]:
    """Write a tensor somewhere into a file; return where it lies, and its values."""
    values = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    file = folder / "file"
    file.write_bytes(b"x" * offset + values.tobytes())
    spec = TensorSpec(key="w", dtype=dtype, shape=shape)
    return Stored(spec=spec, box=spec.box, file=file, offset=offset), values


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return shape, Box(start=start, stop=tuple(draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=shapes_and_boxes(), together=st.sampled_from([0, 16, 4096]), most=st.sampled_from([1, 64, 1 << 20]))
def test_any_box_is_read_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: tuple[tuple[int, ...], Box], together: int, most: int
) -> None:
    """Also where short runs are read with what is between them."""
    (shape, box) = made
    monkeypatch.setattr(ranges, "TOGETHER", together)
    monkeypatch.setattr(ranges, "MOST", most)
    where, values = stored(tmp_path, shape)
    into = bytearray(box.numel * 4)
    with FileRanges() as files:
        files.read(where, box, memoryview(into))
        if not together:
            assert files.bytes == len(into)
    expected = values[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
    assert bytes(into) == np.ascontiguousarray(expected).tobytes()


def test_parts_of_long_rows_are_read_without_the_rest(tmp_path: Path) -> None:
    """A tensor-parallel rank reads its columns alone."""
    where, _ = stored(tmp_path, (8, 4096))
    box = Box(start=(0, 1024), stop=(8, 3072))
    with FileRanges() as files:
        files.read(where, box, memoryview(bytearray(box.numel * 4)))
        assert files.bytes == box.numel * 4


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    """It is an error, and no signal."""
    where, _ = stored(tmp_path, (8, 8))
    where.file.write_bytes(where.file.read_bytes()[:-1])
    with FileRanges() as files, pytest.raises(ForeignFormat, match=r"file: ends 1 bytes before w: it is cut short"):
        files.read(where, where.box, memoryview(bytearray(256)))
