"""Boxes, copies, coverage, digests, the grid and statistics."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.grid import SMALL_BYTES, TILE_BYTES, cut, steps
from checkpointing.format.stats import statistics
from checkpointing.format.tiles import Box, Piece, TensorSpec, copy_box, digest, overlapping, subtract, uncovered


@st.composite
def boxes(draw: st.DrawFn, dims: int, size: int = 6) -> Box:
    pairs = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for _ in range(dims)]
    return Box(start=tuple(a for a, _ in pairs), stop=tuple(b for _, b in pairs))


dims = st.integers(0, 3)
many = dims.flatmap(lambda n: st.tuples(st.just(n), st.lists(boxes(n), max_size=6)))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(dims.flatmap(lambda n: st.tuples(boxes(n), boxes(n))))
def test_box_algebra_agrees_with_sets(pair: tuple[Box, Box]) -> None:
    """Intersection, containment and subtraction give the same as sets of points."""
    one, two = pair
    common = one.intersect(two)
    assert (points(common) if common else set()) == points(one) & points(two)
    assert one.contains(two) == (points(two) <= points(one))
    rest = subtract(one, two)
    assert sum(box.numel for box in rest) == len(points(one) - points(two))
    assert set().union(*map(points, rest)) == points(one) - points(two)


@given(many)
def test_coverage_and_overlap_agree_with_sets(case: tuple[int, list[Box]]) -> None:
    """`uncovered` and `overlapping` return a region exactly when one exists, and a correct one."""
    n, listed = case
    spec = TensorSpec(key="x", dtype="int8", shape=(6,) * n)
    held = set().union(*map(points, listed))
    missing = uncovered(spec, listed)
    assert (missing is None) == (points(spec.box) <= held)
    assert missing is None or (points(missing) and not points(missing) & held)
    shared = overlapping(listed)
    pairs = [points(a) & points(b) for a, b in itertools.combinations(listed, 2)]
    assert (shared is None) == (not any(pairs))
    assert shared is None or any(points(shared) <= pair for pair in pairs)


@given(st.integers(1, 3), st.sets(st.integers(1, 5)), st.data())
def test_a_broken_line_of_boxes_is_detected(n: int, cuts: set[int], data: st.DataObject) -> None:
    """A grid covers its tensor; with one box moved, dropped or stretched it is checked like any boxes."""
    dim = data.draw(st.integers(0, n - 1))
    edges = [0, *sorted(cuts), 6]
    line = [
        Box(start=tuple(a if d == dim else 0 for d in range(n)), stop=tuple(b if d == dim else 6 for d in range(n)))
        for a, b in itertools.pairwise(edges)
    ]
    spec = TensorSpec(key="x", dtype="int8", shape=(6,) * n)
    assert uncovered(spec, line) is None
    assert overlapping(line) is None
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(boxes(n))
    held = set().union(*map(points, line))
    assert (uncovered(spec, line) is None) == (points(spec.box) <= held)
    assert (overlapping(line) is None) == (sum(box.numel for box in line) == len(held))


@given(dims.flatmap(lambda n: st.tuples(boxes(n), boxes(n))), st.sampled_from([1, 2, 4, 8, 16]))
def test_copy_box_equals_numpy_slicing(pair: tuple[Box, Box], size: int) -> None:
    """It copies the intersection and touches nothing else."""
    src, dst = pair
    whole = np.arange(7 ** len(src.start) * size, dtype="u4").astype("u1").reshape(*(7,) * len(src.start), size)
    ours = whole[slices(src)].tobytes()
    target = bytearray(b"\xee" * (dst.numel * size))
    copy_box(ours, src, target, dst, size)
    expected = np.full_like(whole, 0xEE)
    both = src.intersect(dst)
    if both is not None:
        expected[slices(both)] = whole[slices(both)]
    assert bytes(target) == expected[slices(dst)].tobytes()


def test_wrong_lengths_and_boxes_are_refused() -> None:
    """Buffers that do not match their box, and invalid boxes, raise ValueError."""
    box = Box(start=(0,), stop=(4,))
    with pytest.raises(ValueError, match="takes 16 bytes"):
        copy_box(b"x" * 15, box, bytearray(16), box, 4)
    for start, stop in [((2,), (1,)), ((-1,), (1,)), ((0,), (1, 2))]:
        with pytest.raises(ValueError, match="not a box"):
            Box(start=start, stop=stop)


@given(st.lists(st.integers(1, 9), min_size=0, max_size=3), st.integers(4, 200), st.data())
def test_the_tile_grid_is_global_and_bounded(shape: list[int], limit: int, data: st.DataObject) -> None:
    """Tiles of any box partition it, hold their own bytes, fit the limit, and are cut where those of the tensor are."""
    spec = TensorSpec(key="x", dtype="int32", shape=tuple(shape))
    box = Box(
        start=tuple(data.draw(st.integers(0, n - 1)) for n in shape),
        stop=tuple(shape),
    )
    array = np.arange(math.prod(shape), dtype="<i4").reshape(shape)
    everything = Piece(spec=spec, box=spec.box, data=memoryview(array.tobytes()))
    whole = [tile.box for tile in cut(everything, limit)]
    part = array[slices(box)]
    tiles = list(cut(Piece(spec=spec, box=box, data=memoryview(part.tobytes())), limit))
    assert overlapping([t.box for t in tiles]) is None
    assert sum(t.box.numel for t in tiles) == box.numel
    for tile in tiles:
        assert tile.data.nbytes <= limit
        assert bytes(tile.data) == array[slices(tile.box)].tobytes()
        assert any(other.contains(tile.box) for other in whole)


@pytest.mark.parametrize(
    ("shape", "largest"),
    [
        ((1 << 15, 1 << 14), TILE_BYTES),
        ((16, 1 << 24), TILE_BYTES),
        ((6000, 1024), 93 * 4096),
        ((5, 1 << 20), (5 << 22) // 64),
        ((400, 1024), SMALL_BYTES),
        ((10, 100), 4000),
    ],
)
def test_a_tensor_is_cut_into_at_most_about_64_tiles(shape: tuple[int, ...], largest: int) -> None:
    """Of 256 KiB to 4 MiB. Rows are grouped up to the limit; a row above it is cut itself."""
    spec = TensorSpec(key="x", dtype="float32", shape=shape)
    grid = steps(spec)
    stop = tuple(min(size, 2 * step + 1) for size, step in zip(shape, grid, strict=False)) + shape[len(grid) :]
    part = Box(start=(0,) * len(shape), stop=stop)
    tiles = list(cut(Piece(spec=spec, box=part, data=memoryview(bytes(part.numel * 4)))))
    assert max(tile.data.nbytes for tile in tiles) == largest
    assert sum(tile.box.numel for tile in tiles) == part.numel


def test_readers_of_another_layout_read_little_extra() -> None:
    """Tensors of 16 MiB to 1 GiB, cut for 1 to 8 ranks and read by 1 to 3: at most a tenth more."""
    for rows in (4096, 1 << 15, 1 << 18):
        spec = TensorSpec(key="x", dtype="float32", shape=(rows, 1024))
        grid, *_ = steps(spec)
        for old, new in itertools.product(range(1, 9), range(1, 4)):
            edges = sorted({*range(0, rows, grid), *(rows * k // old for k in range(1, old)), rows})
            for rank in range(new):
                low, high = rows * rank // new, rows * (rank + 1) // new
                read = sum(b - a for a, b in itertools.pairwise(edges) if a < high and b > low)
                assert read <= 1.1 * (high - low)


def test_a_digest_covers_dtype_shape_and_bytes() -> None:
    """Each of the three changes it; key, place and the shape of the whole tensor do not."""

    def of(dtype: str, shape: tuple[int, ...], data: bytes, key: str = "a", lead: int = 0) -> str:
        spec = TensorSpec(key=key, dtype=dtype, shape=tuple(n + 9 for n in shape))
        return digest(spec, Box(start=(lead,) * len(shape), stop=tuple(n + lead for n in shape)), data)

    base = of("float32", (2, 3), bytes(24))
    assert base == of("float32", (2, 3), bytes(24), key="b", lead=4)
    others = {of("int32", (2, 3), bytes(24)), of("float32", (3, 2), bytes(24)), of("float32", (2, 3), b"1" * 24)}
    assert len({base, *others}) == 4
    assert digest(TensorSpec(key="s", dtype="int64", shape=()), Box(start=(), stop=()), bytes(8))


def test_statistics_exclude_nan_and_include_infinity() -> None:
    """Min, max, mean square and NaN count, for float dtypes only."""
    values = np.array([1, -2, 3, np.nan], "<f4")
    assert statistics("float32", memoryview(values.tobytes())) == [-2.0, 3.0, 4.66667, 1]
    assert statistics("float32", memoryview(np.array([np.nan], "<f4").tobytes())) == [None, None, None, 1]
    assert statistics("float64", memoryview(np.array([np.inf, 0.0]).tobytes())) == [0.0, "inf", "inf", 0]
    assert statistics("float32", memoryview(np.full(3000, 1e30, "<f4").tobytes())) == [1e30, 1e30, 1e60, 0]
    assert statistics("float16", memoryview(np.full(3000, 6e4, "<f2").tobytes()))[3] == 0  # type: ignore[index]
    bf16 = (np.array([1.5, -2.0], "<f4").view("<u4") >> 16).astype("<u2")
    assert statistics("bfloat16", memoryview(bf16.tobytes())) == [-2.0, 1.5, 3.125, 0]
    assert statistics("int64", memoryview(bytes(8))) is None


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
)
def test_statistics_do_not_depend_on_block_size(numbers: list[float], dtype: str) -> None:
    """They are those of the values in double precision, with NaN anywhere or everywhere."""
    with np.errstate(over="ignore"):
        wide = np.array(numbers, "<f4")
        if dtype == "bfloat16":
            data = (wide.view("<u4") >> 16).astype("<u2")
            values = (data.astype("<u4") << 16).view("<f4").astype("<f8")
        else:
            data = wide.astype(dtype)
            values = data.astype("<f8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("checkpointing.format.stats._BLOCK", 3)
        statistic = statistics(dtype, memoryview(data.tobytes()))
    assert statistic is not None
    good = values[~np.isnan(values)]
    assert statistic[3] == values.size - good.size
    if not good.size:
        assert statistic[:3] == [None, None, None]
        return
    expected = [good.min(), good.max(), np.mean(good * good)]
    assert [float(value) for value in statistic[:3]] == pytest.approx(expected, rel=1e-5)
