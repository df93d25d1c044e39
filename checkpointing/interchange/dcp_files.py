"""Folders of `torch.distributed.checkpoint`: `.metadata` and files of tensors, each as `torch.save` writes it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.errors import ForeignFormat
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange import dcp_metadata, objects, safetensors_files, torch_files
from checkpointing.interchange.contents import Contents
from checkpointing.interchange.foreign import Foreign, Progress, Stored, read_range
from checkpointing.interchange.tensors import DTYPES, dtype_name, tensor_of

METADATA = ".metadata"
FILE_BYTES = 4 << 30
"""Bytes of a data file after which a new one is begun."""


def read(source: Path) -> Foreign:
    """Return where the tensors of a DCP folder lie, and its objects; ForeignFormat if it is not one."""
    name = str(source / METADATA)
    if not (source / METADATA).is_file():
        raise ForeignFormat(f"{name}: is not there, so {source} is no complete DCP checkpoint")
    metadata = dcp_metadata.load((source / METADATA).read_bytes(), name)
    places = metadata.places
    tensors: list[Stored] = []
    held: dict[str, bytes] = {}
    with _Files(source) as files:
        for key, entry in metadata.entries.items():
            if not isinstance(key, str):
                raise ForeignFormat(f"{name}: {key!r} is no name of an entry")
            if isinstance(entry, BytesStorageMetadata):
                info = _info(places, key, None, name)
                path = files.path(info.relative_path)
                wrapped, data = objects.wrap_saved(key, bytes(read_range(path, info.offset, info.length)))
                held[wrapped] = data
            elif isinstance(entry, TensorStorageMetadata):
                tensors.extend(_chunks(key, entry, places, files, name))
            else:
                raise ForeignFormat(f"{name}: {key} is neither a tensor nor an object")
    return Foreign.of(tensors, held, _paths(metadata.paths))


def write(contents: Contents, specs: Mapping[str, TensorSpec], target: Path, progress: Progress) -> None:
    """Write tensors (by the name they are to have) and, if all of them are written, objects as the DCP folder `target`.

    Large tensors are written as several chunks, as if many ranks had saved them. DCP knows only text as keys of dicts:
    numbers as keys become their text. Tensors that shared memory lie at one place.
    """
    target.mkdir()
    entries: dict[str, Any] = {}
    paths: dict[str, objects.Path] = {}
    names = {spec.key: name for name, spec in specs.items()}
    tied = {key: first for key, first in contents.ties().items() if key in names and first in names}
    once = [spec for spec in specs.values() if spec.key not in tied]
    total = sum(spec.box.numel * spec.itemsize for spec in once)
    for name, spec in specs.items():
        properties = TensorProperties(dtype=DTYPES[spec.dtype])
        entries[name] = TensorStorageMetadata(properties=properties, size=torch.Size(spec.shape), chunks=[])
    with _Output(target) as output:
        done = 0
        for name, spec in specs.items():
            if not spec.box.numel:
                output.tensor(name, entries[name], spec, spec.box, memoryview(b""))
        for spec, box, slab in contents.slabs(once):
            output.tensor(names[spec.key], entries[names[spec.key]], spec, box, slab)
            done += slab.nbytes
            progress(done, total)
        for key, first in tied.items():
            output.again(names[key], entries[names[key]], names[first], entries[names[first]])
        if all(name == contents.name(spec.key) for name, spec in specs.items()):
            paths = contents.paths()
            stored = contents.read(list(contents.objects.values()))
            for name, key in contents.objects.items():
                data = bytes(stored[key])
                output.bytes(name, data if key.startswith(objects.TORCH) else objects.saved(objects.unwrap(key, data)))
                entries[name] = BytesStorageMetadata()
        places = output.places
    metadata = Metadata(
        state_dict_metadata=entries,
        # The paths in their own order, which is that of the nested state dict.
        planner_data={
            name: objects.plain_path(name, paths) for name in [*filter(entries.__contains__, paths), *entries]
        },
        storage_data=places,
    )
    with (target / METADATA).open("wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


class _Files:
    """The data files of a folder, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, BinaryIO] = {}
        self._safetensors: dict[tuple[Path, int], dict[str, Stored]] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def path(self, relative: str) -> Path:
        """Return a data file's path; ForeignFormat for one that is not in the folder."""
        if not relative or PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts:
            raise ForeignFormat(f"{self._folder / METADATA}: {relative!r} is not a file in its folder")
        path = self._folder / relative
        if not path.is_file():
            raise ForeignFormat(f"{path}: is missing")
        return path

    def in_safetensors(self, info: _StorageInfo, name: str) -> Stored | None:
        """Return where a tensor lies in safetensors that torch wrote after objects; None in files of another kind."""
        path = self.path(info.relative_path)
        where = (path, info.offset)
        if where not in self._safetensors:
            # Where torch.save writes a zip archive, this has a length and then JSON.
            there = info.offset + 9 <= path.stat().st_size
            begins = bytes(read_range(path, info.offset, 9)) if there else b""
            self._safetensors[where] = safetensors_files.read_file(*where)[0] if begins[8:] == b"{" else {}
        held = self._safetensors[where]
        if held and name not in held:
            raise ForeignFormat(f"{path}: {name} is not in it")
        return held.get(name)

    def tensor(self, info: _StorageInfo, name: str) -> Stored:
        """Return where a tensor lies that `torch.save` wrote."""
        path = self.path(info.relative_path)
        if path not in self._open:
            if len(self._open) >= 64:
                self._open.pop(next(iter(self._open))).close()
            self._open[path] = path.open("rb")
        section = torch_files.Section(self._open[path], info.offset, info.length)
        loaded = torch_files.load_without_data(section, f"{path}: {name}")
        if not isinstance(loaded.value, torch.Tensor):
            raise ForeignFormat(f"{path}: {name} is stored as a {type(loaded.value).__name__}, not as a tensor")
        return torch_files.locate(name, loaded.value, path, loaded.places, info.offset)


def _chunks(
    key: str, entry: TensorStorageMetadata, places: dict[Any, Any], files: _Files, name: str
) -> Iterator[Stored]:
    dtype = dtype_name(entry.properties.dtype) if isinstance(entry.properties, TensorProperties) else None
    if dtype is None or not _sizes(entry.size) or not isinstance(entry.chunks, list):
        raise ForeignFormat(f"{name}: {key}: {entry.properties} {entry.size} cannot be kept")
    spec = TensorSpec(key=key, dtype=dtype, shape=tuple(entry.size))
    boxes = [_box(chunk, spec, name) for chunk in entry.chunks]
    if not spec.box.numel:
        # Nothing is read of it, but its existence is recorded.
        yield Stored(spec=spec, box=spec.box, file=files.path(METADATA), offset=0)
        return
    for box in boxes:
        if not box.numel:
            continue
        info = _info(places, key, box.start, name)
        inside = files.in_safetensors(info, key)
        if inside is not None:
            if inside.spec.shape != box.shape or inside.spec.dtype != dtype:
                raise ForeignFormat(f"{inside.file}: {key} {box} is stored as {inside.spec.dtype} {inside.spec.shape}")
            yield Stored(spec=spec, box=box, file=inside.file, offset=inside.offset)
            continue
        place = files.tensor(info, key)
        if place.spec.shape != box.shape or place.spec.dtype != dtype:
            raise ForeignFormat(
                f"{place.file}: {key} {box} is stored as {place.spec.dtype} {list(place.spec.shape)}, and {METADATA} "
                f"says {dtype} {list(box.shape)}"
            )
        yield Stored(spec=spec, box=box, file=place.file, offset=place.offset, strides=place.strides)


def _info(places: dict[Any, Any], key: str, start: tuple[int, ...] | None, name: str) -> _StorageInfo:
    info = places.get((key, start))
    if not isinstance(info, _StorageInfo):
        raise ForeignFormat(f"{name}: does not say where {key}{list(start or ())} lies")
    fields = vars(info)
    if not isinstance(fields.get("relative_path"), str) or not _sizes((fields.get("offset"), fields.get("length"))):
        raise ForeignFormat(f"{name}: {key} lies at no place in a file")
    if fields.get("transform_descriptors"):
        raise ForeignFormat(
            f"{name}: {key} was transformed when it was saved ({fields['transform_descriptors']}); load the "
            "checkpoint with DCP and save it without extensions"
        )
    return info


def _box(chunk: Any, spec: TensorSpec, name: str) -> Box:
    if isinstance(chunk, ChunkStorageMetadata) and _sizes(chunk.offsets) and _sizes(chunk.sizes):
        start = tuple(chunk.offsets)
        stop = tuple(a + n for a, n in zip(start, chunk.sizes, strict=False))
        if len(start) == len(chunk.sizes) == len(spec.shape) and all(
            b <= n for b, n in zip(stop, spec.shape, strict=True)
        ):
            return Box(start=start, stop=stop)
    raise ForeignFormat(f"{name}: {spec.key} {list(spec.shape)} has a chunk that is not in it: {chunk}")


def _sizes(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _paths(planner_data: Any) -> dict[str, objects.Path]:
    """Return the paths that the default planner left, those of the right form."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: list(path)
        for name, path in planner_data.items()
        if isinstance(name, str) and isinstance(path, tuple) and path and all(type(step) in (str, int) for step in path)
    }


class _Output:
    """The data files being written, and where everything went."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = -1
        self._file: BinaryIO | None = None
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def tensor(self, name: str, entry: TensorStorageMetadata, spec: TensorSpec, box: Box, data: memoryview) -> None:
        """Write one chunk of a tensor."""
        index = MetadataIndex(name, box.start, len(entry.chunks))
        file = self._next()
        offset = file.tell()
        torch.save(tensor_of(data, spec.dtype, box.shape), file)
        self._placed(index, offset)
        entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape)))

    def again(self, name: str, entry: TensorStorageMetadata, first: str, other: TensorStorageMetadata) -> None:
        """Give a tensor the same place as another one."""
        entry.chunks.extend(other.chunks)
        for number, chunk in enumerate(other.chunks):
            self.places[MetadataIndex(name, chunk.offsets, number)] = self.places[
                MetadataIndex(first, chunk.offsets, number)
            ]

    def bytes(self, name: str, data: bytes) -> None:
        """Write one object."""
        file = self._next()
        offset = file.tell()
        file.write(data)
        self._placed(MetadataIndex(name), offset)

    def _placed(self, index: MetadataIndex, offset: int) -> None:
        assert self._file is not None
        self.places[index] = _StorageInfo(f"__0_{self._number}.distcp", offset, self._file.tell() - offset)

    def _next(self) -> BinaryIO:
        if self._file is not None and self._file.tell() >= FILE_BYTES:
            self._finish()
        if self._file is None:
            self._number += 1
            self._file = (self._folder / f"__0_{self._number}.distcp").open("wb")
        return self._file

    def _finish(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
