"""The contents of another tool's files: where each tensor's bytes lie, and the objects.

Readers of the three kinds read only headers and return a `Foreign`; bytes are read when they are written, a slab at a
time. Files are read by ranges, so that one that was cut short is an error and not a signal.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from checkpointing.errors import ForeignFormat
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange.contents import slab_boxes
from checkpointing.interchange.objects import PATHS, TIES, to_json

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A box of a tensor in a file, from byte `offset`. strides: in elements; None for C-contiguous bytes."""

    spec: TensorSpec
    box: Box
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A checkpoint of another tool. objects: by the keys of our format. facts: ours, if it holds any."""

    tensors: tuple[Stored, ...]
    objects: dict[str, bytes] = field(default_factory=dict)
    facts: dict[str, Any] | None = None

    @classmethod
    def of(cls, tensors: Sequence[Stored], held: dict[str, bytes], paths: Mapping[str, object]) -> Self:
        """Return the contents of a state dict: its tensors, its objects, and where its entries belong."""
        if paths:
            held[PATHS] = to_json(paths)
        tied = ties(tensors)
        if tied:
            held[TIES] = to_json(tied)
        return cls(tensors=tuple(tensors), objects=held)


def ties(tensors: Iterable[Stored]) -> list[list[str]]:
    """Return groups of names of tensors that lie at the same place."""
    places: dict[str, list[Any]] = {}
    for stored in tensors:
        if stored.box.numel:
            spec = stored.spec
            place = (spec.dtype, spec.shape, stored.box, stored.file, stored.offset, stored.strides)
            places.setdefault(spec.key, []).append(place)
    groups: dict[frozenset[Any], list[str]] = {}
    for name, spots in places.items():
        groups.setdefault(frozenset(spots), []).append(name)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A part of a stored box, of some tiles, and the offset of its bytes within those of the box."""

    stored: Stored
    box: Box
    skip: int

    @property
    def nbytes(self) -> int:
        """Bytes of the slab."""
        return self.box.numel * self.stored.spec.itemsize

    def read(self) -> memoryview:
        """Return its bytes, C-contiguous; ForeignFormat if the file does not hold them."""
        if self.stored.strides is None:
            return read_range(self.stored.file, self.stored.offset + self.skip, self.nbytes)
        return _gather(self.stored, self.box)


def slabs(stored: Stored, tile_bytes: int) -> Iterator[Slab]:
    """Yield the slabs of a stored box, in the order of their bytes, for tiles of up to `tile_bytes`."""
    skip = 0
    for box in slab_boxes(stored.spec, stored.box, tile_bytes):
        slab = Slab(stored=stored, box=box, skip=skip)
        skip += slab.nbytes
        yield slab


def read_range(file: Path, offset: int, length: int) -> memoryview:
    """Return `length` bytes of a file; ForeignFormat if it has fewer."""
    got = 0
    try:
        # The size that a header claims is not allocated before the file is known to have it.
        if offset + length > file.stat().st_size:
            raise ForeignFormat(f"{file}: ends before its tensors do: it is cut short")
        data = memoryview(bytearray(length))
        with file.open("rb", buffering=0) as opened:
            opened.seek(offset)
            while got < length:
                count = opened.readinto(data[got:])
                if not count:
                    raise ForeignFormat(f"{file}: ends {length - got} bytes before its tensors do: it is cut short")
                got += count
    except OSError as error:
        raise ForeignFormat(f"{file}: cannot be read: {error}") from error
    return data


def _gather(stored: Stored, box: Box) -> memoryview:
    """Return the bytes of a box of a tensor that was saved transposed, or as a view with gaps."""
    assert stored.strides is not None
    itemsize = stored.spec.itemsize
    kind = f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
    first = stored.offset + itemsize * _dot(box.start, stored.box.start, stored.strides)
    end = first + itemsize * (1 + sum((n - 1) * step for n, step in zip(box.shape, stored.strides, strict=True)))
    with stored.file.open("rb") as opened:
        if end > os.fstat(opened.fileno()).st_size:
            raise ForeignFormat(f"{stored.file}: is cut short: {stored.spec.key} is not in it whole")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            view = np.ndarray(
                box.shape, kind, buffer=mapped, offset=first, strides=tuple(step * itemsize for step in stored.strides)
            )
            # The mapping cannot be closed while an array refers to it.
            data = view.tobytes()
            del view
    return memoryview(data)


def _dot(start: tuple[int, ...], origin: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum((a - o) * step for a, o, step in zip(start, origin, strides, strict=True))
