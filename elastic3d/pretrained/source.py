"""Where pretrained weights come from: files of other tools, or a checkpoint in a store of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from blake3 import blake3

from checkpointing import Checkpoint, Store, open_checkpoint, resolve_name
from checkpointing.errors import CheckpointError
from checkpointing.format.announcement import Role
from checkpointing.format.tiles import Box, TensorSpec, subtract
from checkpointing.interchange.contents import slab_boxes
from checkpointing.interchange.folders import locate_all
from checkpointing.interchange.foreign import Stored
from checkpointing.interchange.objects import is_object
from checkpointing.interchange.ranges import FileRanges
from checkpointing.interchange.tensors import buffer_of, tensor_of
from checkpointing.reading.announcing import announced
from checkpointing.reading.resolver import resolve
from checkpointing.stores.address import NO_USER, redacted, split_name
from elastic3d.devices import ComputeDevice
from elastic3d.errors import StateError
from elastic3d.parallel.restore_buffers import RestoreBuffers
from elastic3d.parallel.state import TensorInMemory
from elastic3d.pretrained.renaming import Arrangement, PartThere
from elastic3d.storage import open_to_read
from elastic3d.values import StoreAt

_SLAB = 1 << 20
_BATCH = 256 << 20
_SAMPLE = 64
_SOURCE = "weights"


class WeightsSource(Protocol):
    """Weights whose names, shapes and dtypes are known, and whose bytes are read when they are asked for."""

    specs: Mapping[str, TensorSpec]
    """All tensors there, by their names there."""
    fingerprint: str
    """The same for the same weights, wherever they lie."""

    def fill(self, wanted: Sequence[TensorInMemory], device: ComputeDevice, arrived: Callable[[], object]) -> int:
        """Read parts of tensors into memory, widened where that is wider; return how many bytes were read.

        wanted: the tensors of this rank, under their specs there. arrived: called after each part. CheckpointError for
        what cannot be read, or is damaged.
        """
        ...

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors there are known to be equal without reading them."""
        ...

    def arranged(self, arrangement: Arrangement) -> WeightsSource | None:
        """Return the same weights under other names, and parts put together; None where that is not possible."""
        ...


def open_source(named: str, key: str = "") -> WeightsSource:
    """Return the weights that a user has named; StateError says what is wrong with the name, or what it names.

    named: path of a file or folder, or `URL@checkpoint` for a store of ours. key: file with a store's key, "" for none.
    """
    url, checkpoint = split_name(named)
    try:
        path = Path(url).expanduser()
    except RuntimeError:
        raise StateError(f"weights={named!r}: {NO_USER}") from None
    try:
        if checkpoint or (path / "refs" / "latest").is_file() or "://" in url:
            return StoreWeights(StoreAt(url=url, key=key), checkpoint or "latest")
        if not path.exists():
            raise StateError(
                f"weights={named!r}: there is no such file or folder on this node. Trying again does not help: give a "
                "folder or file that every node has, or URL@checkpoint for a store of elastic3d. A model of the Hub is "
                "fetched by `hf download`, which prints its folder"
            )
        return FileWeights(path)
    except (CheckpointError, OSError) as error:
        raise StateError(f"weights={redacted(named)!r} cannot be used: {error}") from error


class FileWeights:
    """Weights in files of Hugging Face, safetensors, torch.save or DCP: each rank reads the ranges that it holds."""

    def __init__(self, path: Path) -> None:
        self._parts: dict[str, list[Stored]] = {}
        for stored in locate_all(path).tensors:
            self._parts.setdefault(stored.spec.key, []).append(stored)
        self.specs: Mapping[str, TensorSpec] = {key: parts[0].spec for key, parts in self._parts.items()}
        self.fingerprint = f"files {self._digest()}"

    def fill(self, wanted: Sequence[TensorInMemory], device: ComputeDevice, arrived: Callable[[], object]) -> int:
        """Read the boxes of these tensors, in the order in which they lie in the files."""
        in_order = sorted(wanted, key=lambda one: (str(self._parts[one.spec.key][0].file), self._offset(one)))
        with FileRanges() as files, torch.no_grad():
            for one in in_order:
                missing = [one.box] if one.box.numel else []
                for stored in self._parts[one.spec.key]:
                    common = stored.box.intersect(one.box)
                    if common is not None and missing:
                        _read(files, stored, common, one, arrived)
                        missing = [rest for box in missing for rest in subtract(box, common)]
                if missing:
                    raise StateError(
                        f"{stored.file.parent}: {one.spec.key} is not there whole: {missing[0]} is missing"
                    )
            return files.bytes

    def same(self, one: str, other: str) -> bool:
        """Return whether they lie at one place."""
        places = [
            {(part.box, part.file, part.offset, part.strides) for part in self._parts[name]} for name in (one, other)
        ]
        return places[0] == places[1]

    def arranged(self, arrangement: Arrangement) -> WeightsSource:
        """Return the same weights under other names, and parts put together."""
        made = copy.copy(self)
        made._parts = {
            key: [_moved(stored, part) for part in parts for stored in self._parts[part.name]]
            for key, parts in arrangement.items()
        }
        made.specs = {key: parts[0].spec for key, parts in made._parts.items()}
        return made

    def _offset(self, one: TensorInMemory) -> int:
        return self._parts[one.spec.key][0].offset

    def _digest(self) -> str:
        """Return a digest of all names, dtypes and shapes, and of some bytes of each tensor."""
        hasher = blake3()
        with FileRanges() as files:
            for key, spec in sorted(self.specs.items()):
                hasher.update(f"{key} {spec.dtype} {spec.shape}\n".encode())
                first = min(self._parts[key], key=lambda stored: stored.box.start)
                few = Box(
                    start=first.box.start,
                    stop=tuple(
                        start
                        + (min(length, _SAMPLE // spec.itemsize) if dim == len(spec.shape) - 1 else min(length, 1))
                        for dim, (start, length) in enumerate(zip(first.box.start, first.box.shape, strict=True))
                    ),
                )
                data = bytearray(few.numel * spec.itemsize)
                files.read(first, few, memoryview(data))
                hasher.update(data)
        return hasher.hexdigest()[:32]


def _read(files: FileRanges, stored: Stored, box: Box, one: TensorInMemory, arrived: Callable[[], object]) -> None:
    """Read a box of a tensor into its place: straight into plain memory, else through a buffer."""
    here, into = one.box, one.local
    straight = (
        box == here
        and into.device.type == "cpu"
        and into.is_contiguous()
        and str(into.dtype).removeprefix("torch.") == stored.spec.dtype
    )
    view, at = buffer_of(into) if straight else memoryview(b""), 0
    for slab in slab_boxes(stored.spec, box, _SLAB):
        nbytes = slab.numel * stored.spec.itemsize
        if straight:
            files.read(stored, slab, view[at : at + nbytes])
            at += nbytes
        else:
            data = memoryview(bytearray(nbytes))
            files.read(stored, slab, data)
            part: Any = tuple(slice(a - o, b - o) for a, b, o in zip(slab.start, slab.stop, here.start, strict=True))
            into[part].copy_(tensor_of(data, stored.spec.dtype, slab.shape))
        arrived()


class StoreWeights:
    """Weights in a checkpoint of ours: each rank reads the tiles that overlap what it holds, and verifies them."""

    def __init__(self, at: StoreAt, checkpoint: str) -> None:
        self._store: Store = open_to_read(at)
        self._opened: Checkpoint = open_checkpoint(self._store, resolve_name(self._store, checkpoint))
        self.specs: Mapping[str, TensorSpec] = {
            key: spec for key, spec in self._opened.specs.items() if not is_object(key)
        }
        self.fingerprint = f"checkpoint {self._opened.root}"

    def fill(self, wanted: Sequence[TensorInMemory], device: ComputeDevice, arrived: Callable[[], object]) -> int:
        """Read the tiles of these tensors, a bounded amount of them at a time."""
        sources = {_SOURCE: self._opened.source(_SOURCE)}
        keys = {one.spec.key for one in wanted}
        offers = [offer for offer in self._opened.offers(_SOURCE) if offer.spec.key in keys]
        read = 0
        with ExitStack() as stack:
            stack.enter_context(announced(self._store, Role.READER, self._opened.name))
            for batch in _batches(wanted):
                buffers = RestoreBuffers(batch, device)
                resolved = resolve(buffers.wanted(), offers, sources, buffers.destination, arrived=arrived)
                read += sum(tally.bytes for tally in resolved.sources.values())
                buffers.settle()
        return read

    def same(self, one: str, other: str) -> bool:
        """Return whether their tiles have the same digests."""
        tiles = [{(t.box, t.digest) for t in self._opened.tiles if t.spec.key == name} for name in (one, other)]
        return tiles[0] == tiles[1]

    def arranged(self, arrangement: Arrangement) -> None:
        """Return None: tiles lie under the names that they were saved with."""
        return


def _moved(stored: Stored, part: PartThere) -> Stored:
    """Return a stored box as one of the tensor that its own is a part of."""
    lead = len(part.box.start) - len(stored.box.start)
    start = (*part.box.start[:lead], *(a + b for a, b in zip(part.box.start[lead:], stored.box.start, strict=True)))
    stop = (*part.box.stop[:lead], *(a + b for a, b in zip(part.box.start[lead:], stored.box.stop, strict=True)))
    strides = None if stored.strides is None else (*(0,) * lead, *stored.strides)
    return replace(stored, spec=part.spec, box=Box(start=start, stop=stop), strides=strides)


def _batches(wanted: Sequence[TensorInMemory]) -> list[list[TensorInMemory]]:
    batches: list[list[TensorInMemory]] = [[]]
    held = 0
    keys: set[str] = set()
    for one in wanted:
        nbytes = one.box.numel * one.spec.itemsize
        # Buffers go by the name there, which two tensors of the model may have.
        if batches[-1] and (held + nbytes > _BATCH or one.spec.key in keys):
            batches.append([])
            held, keys = 0, set()
        batches[-1].append(one)
        keys.add(one.spec.key)
        held += nbytes
    return batches
