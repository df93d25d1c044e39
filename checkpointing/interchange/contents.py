"""A checkpoint's tensors and objects, read a bounded amount at a time."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import FormatError
from checkpointing.format import grid
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.objects import Path
from checkpointing.reading.reader import Checkpoint
from checkpointing.reading.resolver import Offered, resolve

BATCH_BYTES = 64 << 20
"""Bytes held at once while a checkpoint is read or written piece by piece."""

SLAB_TILES = 16
"""Neighbouring tiles that are moved together, as far as they are of `SLAB_BYTES` in all."""

SLAB_BYTES = 64 << 20
"""Bytes of the largest slab, unless one tile alone is larger."""

_SOURCE = "store"


def slab_boxes(spec: TensorSpec, box: Box, tile_bytes: int) -> Iterator[Box]:
    """Yield the slabs of a box, in the order of their bytes, for tiles of up to `tile_bytes`."""
    together = min(SLAB_TILES, SLAB_BYTES // grid.largest(spec, tile_bytes))
    return grid.boxes(spec, box, tile_bytes, together=max(1, together))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One region of a tensor, and the writable buffer of its bytes."""

    spec: TensorSpec
    box: Box
    buffer: memoryview | bytearray


class Contents:
    """The contents of a checkpoint. Every tile is verified when it is read; errors are those of `resolve`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._sources = {_SOURCE: checkpoint.source(_SOURCE)}
        self._offers: dict[str, list[Offered]] = defaultdict(list)
        for offer in checkpoint.offers(_SOURCE):
            self._offers[offer.spec.key].append(offer)

    @property
    def tensors(self) -> list[TensorSpec]:
        """Every tensor that does not hold an object, by key."""
        return [spec for key, spec in sorted(self.checkpoint.specs.items()) if not objects.is_object(key)]

    @property
    def objects(self) -> dict[str, str]:
        """The key of every object, by the object's own name in the state dict."""
        return {
            self.name(objects.name_of(key)): key
            for key in sorted(self.checkpoint.specs)
            if objects.is_object(key) and key not in (objects.PATHS, objects.TIES, objects.NAMES)
        }

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """The names of entries whose keys differ from their names, by key."""
        if objects.NAMES not in self.checkpoint.specs:
            return {}
        return objects.read_names(bytes(self.read([objects.NAMES])[objects.NAMES]))

    def name(self, key: str) -> str:
        """Return the name of a tensor, or of an object, as the state dict has it."""
        return self.names.get(key, key)

    def spec(self, name: str) -> TensorSpec | None:
        """Return the spec of the tensor of this name, None if there is none."""
        made = objects.key_of(name)
        return self.checkpoint.specs.get(made if made in self.names else name)

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read regions into their buffers, all at once."""
        buffers: dict[tuple[TensorSpec, Box], list[memoryview]] = defaultdict(list)
        for want in wanted:
            buffers[want.spec, want.box].append(memoryview(want.buffer).cast("B"))
        regions = [region for region, waiting in buffers.items() for _ in waiting]
        keys = dict.fromkeys(spec.key for spec, _ in regions)
        offers = [offer for key in keys for offer in self._offers.get(key, ())]
        resolve(regions, offers, self._sources, lambda spec, box: buffers[spec, box].pop())

    def read(self, keys: Sequence[str]) -> dict[str, bytearray]:
        """Return the bytes of small tensors, whole."""
        buffers = {key: bytearray(spec.box.numel * spec.itemsize) for key, spec in self._specs(keys).items()}
        specs = self.checkpoint.specs
        self.fill(Wanted(spec=specs[key], box=specs[key].box, buffer=buffers[key]) for key in buffers)
        return buffers

    def slabs(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, Box, memoryview]]:
        """Yield tensors slab by slab, in the order of their bytes; at most two batches are in memory."""
        return self.slabs_of((spec, spec.box) for spec in specs)

    def slabs_of(self, regions: Iterable[tuple[TensorSpec, Box]]) -> Iterator[tuple[TensorSpec, Box, memoryview]]:
        """Yield parts of tensors slab by slab, in the order of their bytes; at most two batches are in memory."""
        batch: list[Wanted] = []
        held = 0
        for spec, region in regions:
            # As it was cut: a slab across the edges of tiles would read those at both of its ends in vain.
            cut = max((offer.nbytes for offer in self._offers.get(spec.key, ())), default=grid.TILE_BYTES)
            for box in slab_boxes(spec, region, max(1, cut)):
                nbytes = box.numel * spec.itemsize
                if batch and held + nbytes > BATCH_BYTES:
                    yield from self._flush(batch)
                    batch, held = [], 0
                batch.append(Wanted(spec=spec, box=box, buffer=bytearray(nbytes)))
                held += nbytes
        yield from self._flush(batch)

    def values(self) -> dict[str, Any]:
        """Return every object by its own name; Unloadable for pickles that are not plain data."""
        keys = self.objects
        data = self.read(list(keys.values()))
        return {name: objects.unwrap(key, bytes(data[key])) for name, key in keys.items()}

    def paths(self) -> dict[str, Path]:
        """Return the path of each flat key in the nested state dict, as far as it was saved."""
        if objects.PATHS not in self.checkpoint.specs:
            return {}
        return objects.read_paths(bytes(self.read([objects.PATHS])[objects.PATHS]))

    def ties(self) -> dict[str, str]:
        """Return for each tensor that shares memory with another one that other one's key.

        Only tensors that are still equal to the last bit count: others no longer share it.
        """
        if objects.TIES not in self.checkpoint.specs:
            return {}
        ties: dict[str, str] = {}
        for group in objects.read_ties(bytes(self.read([objects.TIES])[objects.TIES])):
            there = [key for key in group if key in self.checkpoint.specs]
            ties |= {key: there[0] for key in there[1:] if self.same(key, there[0])}
        return ties

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors, by key, are cut alike and equal to the last bit."""
        return self._look(one) == self._look(other)

    def _look(self, key: str) -> tuple[str, tuple[int, ...], frozenset[tuple[Box, str]]]:
        spec = self.checkpoint.specs[key]
        return spec.dtype, spec.shape, frozenset((offer.box, offer.digest) for offer in self._offers.get(key, ()))

    def _flush(self, batch: list[Wanted]) -> Iterator[tuple[TensorSpec, Box, memoryview]]:
        self.fill(batch)
        for want in batch:
            yield want.spec, want.box, memoryview(want.buffer)

    def _specs(self, keys: Sequence[str]) -> dict[str, TensorSpec]:
        specs = {key: self.checkpoint.specs[key] for key in keys}
        for key, spec in specs.items():
            if spec.dtype != "uint8" or len(spec.shape) != 1:
                raise FormatError(f"{key}: is {spec.dtype} {list(spec.shape)}, where an object is one row of uint8")
        return specs
