"""Files of `torch.save`: their tensors are located without loading them, and written piece by piece.

Pickles are read by torch's own `weights_only` unpickler, with storages on the meta device, which know where in the file
their bytes lie. torch adds that up from sizes, as if it had packed the file itself, so the archive's own directory has
to say the same. For writing, torch first makes a file with space for every storage (`torch.serialization.skip_data`);
the bytes then go into that space, slab by slab.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpointing.errors import ForeignFormat
from checkpointing.format.tiles import TensorSpec
from checkpointing.interchange import objects
from checkpointing.interchange.archives import members
from checkpointing.interchange.checksums import mend
from checkpointing.interchange.contents import Contents
from checkpointing.interchange.foreign import Foreign, Progress, Stored
from checkpointing.interchange.tensors import DTYPES, dtype_name

_STORAGE = re.compile(r"[^/]*/data/(?P<number>\d+)")


class Section(io.RawIOBase):
    """A range of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move within the range."""
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return the position in the range."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read, but not beyond the end of the range."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(view.nbytes, self._length - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `torch.save` wrote, tensors without bytes. places: how many bytes a storage has that lies at an offset."""

    value: Any
    places: Mapping[int, int]


def read(source: Path) -> Foreign:
    """Return where the tensors of a `torch.save` file lie, and its objects; ForeignFormat for what is not a state dict.

    Nested dicts and lists are taken apart as `torch.distributed.checkpoint` does it.
    """
    with source.open("rb") as file:
        loaded = load_without_data(file, str(source))
    state = loaded.value
    if not isinstance(state, Mapping):
        raise ForeignFormat(f"{source}: holds a {type(state).__name__}, not a state dict")
    leaves, paths = objects.flatten(state)
    tensors, held = [], {}
    for name, value in leaves.items():
        if isinstance(value, torch.Tensor):
            tensors.append(locate(name, value, source, loaded.places))
        elif _hides_tensor(value):
            raise ForeignFormat(f"{source}: {name}: a tensor inside a {type(value).__name__} cannot be kept")
        else:
            key, data = objects.wrap(name, value)
            held[key] = data
    return Foreign.of(tensors, held, paths)


def load_without_data(file: Any, name: str, *, fake: bool = False, ours: bool = False) -> Loaded:
    """Return what `torch.save` wrote to an open file, its tensors without bytes; ForeignFormat names the file.

    ours: this process has just written the file from its own values, so that there is no need for caution. fake: make
    fake tensors, for a torch whose meta tensors do not know where their bytes lie.
    """
    mode: Any = contextlib.nullcontext()
    if fake:
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode()
    try:
        places = _places(file)
        file.seek(0)
        # torch's own reader does not compare checksums, which torch may have been told not to compute.
        records: Any = torch.PyTorchFileReader(file)
        if records.has_record("byteorder") and records.get_record("byteorder") == b"big":
            raise ForeignFormat(f"{name}: was saved on a big-endian machine; load and save it again here")
        file.seek(0)
        with mode:
            value = torch.load(file, map_location=None if fake else "meta", weights_only=not ours)
        return Loaded(value=value, places=places)
    except zipfile.BadZipFile as error:
        raise ForeignFormat(
            f"{name}: is no file of torch.save, is cut short, or is older than torch 1.6 (load and save it again)"
        ) from error
    except pickle.UnpicklingError as error:
        raise ForeignFormat(
            f"{name}: holds more than tensors and plain data, and is not loaded: {str(error).strip().splitlines()[0]} "
            "If you trust whoever saved it, allow its classes with torch.serialization.add_safe_globals and try again."
        ) from error
    except objects.ON_DAMAGE as error:
        raise ForeignFormat(f"{name}: is damaged: torch cannot read it: {error}") from error


def _places(file: BinaryIO) -> dict[int, int]:
    """Return where storages lie as torch writes them, and their bytes; {} if the archive is in another order."""
    numbered: dict[int, int] = {}
    places: dict[int, int] = {}
    in_order = sorted(members(file).items())
    for offset, member in in_order:
        storage = _STORAGE.fullmatch(member.filename)
        if storage is not None:
            numbered[offset] = int(storage["number"])
            if member.compress_type == zipfile.ZIP_STORED:
                places[offset] = member.file_size
    # Where a torch adds sizes up, it takes storages to lie in the order of their numbers; an older one looks each up.
    added_up = any(member.filename.endswith("/.format_version") for _, member in in_order)
    if added_up and list(numbered.values()) != sorted(numbered.values()):
        return {}
    return places


def locate(name: str, tensor: torch.Tensor, file: Path, places: Mapping[int, int], base: int = 0) -> Stored:
    """Return where the bytes of a tensor without data lie, in a file whose archive begins at byte `base`.

    places: of the storages in that archive, as it was loaded.
    """
    dtype = dtype_name(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        what = f"{tensor.layout} {tensor.dtype} {list(tensor.shape)}" + (" conjugated" if tensor.is_conj() else "")
        raise ForeignFormat(f"{file}: {name}: {what} cannot be kept; save it as a plain dense tensor")
    spec = TensorSpec(key=name, dtype=dtype, shape=tuple(tensor.shape))
    offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if offset is None:
        raise ForeignFormat(f"{file}: {name}: this torch does not say where its bytes lie; upgrade torch")
    if spec.box.numel and places.get(offset) != tensor.untyped_storage().nbytes():
        raise ForeignFormat(f"{file}: {name}: was packed anew by another tool; load the file and save it again")
    return Stored(
        spec=spec,
        box=spec.box,
        file=file,
        offset=base + offset + tensor.storage_offset() * spec.itemsize,
        strides=None if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def write(contents: Contents, specs: Mapping[str, TensorSpec], target: Path, progress: Progress) -> None:
    """Write tensors (by the name they are to have) and, if all are written, objects as one file of `torch.save`.

    Tensors that shared memory do so again when loaded, and are in the file once.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        leaves: dict[str, Any] = {
            name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype]) for name, spec in specs.items()
        }
    named = {spec.key: name for name, spec in specs.items()}
    tied = {key: first for key, first in contents.ties().items() if key in named and first in named}
    leaves |= {named[key]: leaves[named[first]] for key, first in tied.items()}
    state: dict[Any, Any] = leaves
    if all(name == contents.name(spec.key) for name, spec in specs.items()):
        leaves |= contents.values()
        state = _nested(leaves, contents.paths())
    # Given an open file rather than its name, torch raises Python's errors, and does not put the name into the archive.
    with target.open("wb") as opened, torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, opened)
    with target.open("rb") as written:
        loaded = load_without_data(written, str(target), ours=True)
    flat, _ = objects.flatten(loaded.value)
    offsets = {
        name: locate(name, value, target, loaded.places).offset
        for name, value in flat.items()
        if isinstance(value, torch.Tensor)
    }
    written_once = [spec for spec in specs.values() if spec.key not in tied]
    begins = {spec.key: offsets[named[spec.key]] for spec in written_once if spec.box.numel}
    total = sum(spec.box.numel * spec.itemsize for spec in written_once)
    done, at, checksums = 0, dict(begins), dict.fromkeys(begins.values(), 0)
    with target.open("r+b") as file:
        for spec, _, data in contents.slabs(written_once):
            file.seek(at[spec.key])
            file.write(data)
            at[spec.key] += data.nbytes
            checksums[begins[spec.key]] = zlib.crc32(data, checksums[begins[spec.key]])
            done += data.nbytes
            progress(done, total)
        file.flush()
        mend(file, checksums)
        os.fsync(file.fileno())


def _nested(leaves: dict[str, Any], paths: dict[str, objects.Path]) -> dict[Any, Any]:
    """Return the state dict nested as it was, or flat if the saved paths do not lead back."""
    ordered = {name: leaves[name] for name in [*(n for n in paths if n in leaves), *leaves]}
    try:
        state = objects.unflatten(ordered, paths)
        again, _ = objects.flatten(state)
    except (ForeignFormat, AttributeError, TypeError, IndexError):
        return leaves
    return state if again.keys() == leaves.keys() else leaves


def _hides_tensor(value: Any) -> bool:
    return any(isinstance(item, torch.Tensor) or torch.is_storage(item) for item in _walk(value))


def _walk(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _walk(item)
