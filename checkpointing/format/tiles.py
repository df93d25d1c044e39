"""The shared vocabulary: specs, boxes, pieces, and their meaning as bytes.

A *spec* names a global tensor. A *box* is a half-open region of it in global coordinates. A *piece* is the bytes of
one box. A *tile* is a piece no larger than the grid allows (`checkpointing.format.grid`), identified by its digest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import numpy as np
import numpy.typing as npt

from checkpointing.errors import FormatError

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16, "complex64": 8, "complex32": 4,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes per element of every dtype the format knows, under torch's names. An element of float4_e2m1fn_x2 is two
values."""


LONGEST_KEY = 4096
"""The most characters of a key."""


def is_key(text: str) -> bool:
    """Return whether a text may name a tensor."""
    return text.isprintable() and len(text) <= LONGEST_KEY


def itemsize(dtype: str) -> int:
    """Return the bytes of one element; ValueError for a dtype the format does not know."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype!r} cannot be stored; known are {', '.join(ITEMSIZE)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A global tensor."""

    key: str
    """Its name."""
    dtype: str
    """torch's name of its dtype, without `torch.`."""
    shape: tuple[int, ...]
    """Its whole shape, in elements."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @property
    def box(self) -> Box:
        """The whole tensor."""
        return Box(start=(0,) * len(self.shape), stop=self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A half-open region in global coordinates; a scalar's box has no dims and one element."""

    start: tuple[int, ...]
    """First index of each dim."""
    stop: tuple[int, ...]
    """Index behind the last of each dim."""

    def __post_init__(self) -> None:
        # Manifests have a great many of these: a loop costs half as much as `any` over a generator.
        fine = len(self.start) == len(self.stop)
        for low, high in zip(self.start, self.stop, strict=False):
            if low < 0 or high < low:
                fine = False
        if not fine:
            raise ValueError(f"not a box: start {self.start}, stop {self.stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar's box."""
        elements = 1
        for low, high in zip(self.start, self.stop, strict=True):
            elements *= high - low
        return elements

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, None when it has no element. Both boxes are of one tensor."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if len(self.start) != len(other.start):
            raise ValueError(f"boxes of different dims: {self} and {other}")
        for low, high in zip(start, stop, strict=True):
            if high <= low:
                return None
        return Box(start=start, stop=stop)

    def contains(self, other: Box) -> bool:
        """Return whether every element of `other` is in this box; an empty box is in any."""
        return other.numel == 0 or self.intersect(other) == other

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a tensor."""

    spec: TensorSpec
    """The tensor."""
    box: Box
    """Which part of it."""
    data: memoryview
    """Its bytes: C-contiguous, native little-endian."""
    digest: str = ""
    """BLAKE3 digest of its bytes, in hex, where it was taken already: the piece is a tile then, and is cut no more."""


def digest(spec: TensorSpec, box: Box, data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 hex digest over dtype, box shape and bytes, but neither name nor place.

    It covers the ASCII line `dtype:d0,d1,...` with its newline, then the bytes. It is computed on one thread, since
    keepers share their node with trainers.
    """
    hasher = begin_digest(spec, box)
    hasher.update(data)
    return hasher.hexdigest()


def begin_digest(spec: TensorSpec, box: Box) -> blake3.blake3:
    """Return what `digest` is computed with, for bytes that come piece by piece."""
    return blake3.blake3(f"{spec.dtype}:{','.join(map(str, box.shape))}\n".encode())


def copy_box(
    src: bytes | bytearray | memoryview, src_box: Box, dst: bytearray | memoryview, dst_box: Box, itemsize: int
) -> None:
    """Copy the intersection of two boxes of one tensor, from the bytes of the one to the bytes of the other.

    `src` and `dst` are C-contiguous and hold exactly their boxes; ValueError otherwise. Nothing happens when the
    boxes have no element in common.
    """
    common = src_box.intersect(dst_box)
    if common is None:
        return
    source, target = _array(src, src_box, itemsize), _array(dst, dst_box, itemsize)
    target[_slices(common, dst_box)] = source[_slices(common, src_box)]


def _array(data: bytes | bytearray | memoryview, box: Box, itemsize: int) -> npt.NDArray[np.void]:
    nbytes = memoryview(data).nbytes
    if nbytes != box.numel * itemsize:
        raise ValueError(f"{box} with {itemsize} bytes per element takes {box.numel * itemsize} bytes, not {nbytes}")
    # Unsigned integers move any bit pattern unchanged, and faster than void.
    kind = f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
    return np.frombuffer(data, dtype=kind).reshape(box.shape)


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(inner.start, inner.stop, outer.start, strict=True))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that together are `box` without `hole`."""
    common = box.intersect(hole)
    if common is None:
        return [box] if box.numel else []
    rest = []
    start, stop = list(box.start), list(box.stop)
    for dim, (low, high) in enumerate(zip(common.start, common.stop, strict=True)):
        if start[dim] < low:
            rest.append(Box(start=tuple(start), stop=(*stop[:dim], low, *stop[dim + 1 :])))
        if high < stop[dim]:
            rest.append(Box(start=(*start[:dim], high, *start[dim + 1 :]), stop=tuple(stop)))
        start[dim], stop[dim] = low, high
    return rest


def uncovered(spec: TensorSpec, boxes: Iterable[Box]) -> Box | None:
    """Return None when the boxes together hold every element of the tensor, else one region that none holds.

    FormatError when they are cut in too many ways to be compared.
    """
    whole, boxes = spec.box, set(boxes)
    if not whole.numel or (boxes and _line(list(boxes)) == whole):
        return None
    clipped = list({common for box in boxes if (common := box.intersect(whole)) is not None})
    return _gap(whole, clipped, 0, _Effort(clipped))


def _line(boxes: Sequence[Box]) -> Box | None:
    """Return the box made of boxes that follow one another along one dim without gap or overlap; None for others.

    Grids usually cut like this, and sorting is enough to see it.
    """
    ordered = sorted(boxes, key=lambda box: box.start)
    first, last = ordered[0], ordered[-1]
    dims = [dim for dim, low in enumerate(first.start) if low != last.start[dim]]
    if len(dims) != 1:
        return first if len(ordered) == 1 else None
    (dim,) = dims
    start, stop = first.start, first.stop
    sides = (start[:dim], start[dim + 1 :], stop[:dim], stop[dim + 1 :])
    reached = start[dim]
    for box in ordered:
        low, high = box.start, box.stop
        if low[dim] != reached or (low[:dim], low[dim + 1 :], high[:dim], high[dim + 1 :]) != sides:
            return None
        reached = high[dim]
    return Box(start=start, stop=last.stop)


class _Effort:
    """A limit on comparing boxes: boxes that are cut in many different ways can take for ever, and strangers make them.

    It is far more than a grid needs, or several overlaid grids.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._left = 1_000_000 + 1000 * len(boxes)

    def spend(self, boxes: Sequence[Box]) -> None:
        self._left -= 1 + len(boxes)
        if self._left < 0:
            raise FormatError("boxes of one tensor are cut in too many ways to be compared")


def _gap(whole: Box, boxes: Sequence[Box], dim: int, effort: _Effort) -> Box | None:
    effort.spend(boxes)
    if dim == len(whole.start):
        return None if boxes else whole
    for low, high, active in _slabs(whole.start[dim], whole.stop[dim], boxes, dim):
        slab = Box(
            start=(*whole.start[:dim], low, *whole.start[dim + 1 :]),
            stop=(*whole.stop[:dim], high, *whole.stop[dim + 1 :]),
        )
        missing = _gap(slab, active, dim + 1, effort)
        if missing is not None:
            return missing
    return None


def overlapping(boxes: Sequence[Box]) -> Box | None:
    """Return None when no two boxes share an element, else one region that two of them share.

    FormatError when they are cut in too many ways to be compared.
    """
    boxes = [box for box in boxes if box.numel]
    if len(boxes) < 2 or _line(boxes) is not None:
        return None
    return _overlap(boxes, 0, (), (), _Effort(boxes))


def _overlap(
    boxes: Sequence[Box], dim: int, start: tuple[int, ...], stop: tuple[int, ...], effort: _Effort
) -> Box | None:
    effort.spend(boxes)
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0].start):
        return Box(start=start, stop=stop)
    low, high = min(b.start[dim] for b in boxes), max(b.stop[dim] for b in boxes)
    for slab_low, slab_high, active in _slabs(low, high, boxes, dim):
        shared = _overlap(active, dim + 1, (*start, slab_low), (*stop, slab_high), effort)
        if shared is not None:
            return shared
    return None


def _slabs(low: int, high: int, boxes: Sequence[Box], dim: int) -> Iterator[tuple[int, int, list[Box]]]:
    """Cut [low, high) wherever a box begins or ends along `dim`; yield each slab with the boxes that span it."""
    edges = sorted({low, high, *(b.start[dim] for b in boxes), *(b.stop[dim] for b in boxes)})
    pending = sorted(boxes, key=lambda b: b.start[dim], reverse=True)
    active: list[Box] = []
    for slab_low, slab_high in itertools.pairwise(edges):
        active = [b for b in active if b.stop[dim] > slab_low]
        while pending and pending[-1].start[dim] <= slab_low:
            active.append(pending.pop())
        yield slab_low, slab_high, list(active)
