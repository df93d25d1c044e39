"""DCP's `.metadata`, which is a pickle, read by an unpickler that knows a few harmless classes and nothing else."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from checkpointing.errors import ForeignFormat

_CLASSES: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    # Paths stand where a checkpoint was once written; none is ever opened.
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    },
}

_FORMATS = {item.value: item for item in metadata._MEM_FORMAT_ENCODING}


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """The contents of a `.metadata`; a field of an entry may have any allowed type, so that its user must check it.

    entries: by key. places: where each item lies, by key and start (None for an object). paths: the planner's.
    """

    entries: dict[Any, Any]
    places: dict[tuple[Any, tuple[Any, ...] | None], Any]
    paths: Any


def load(data: bytes, name: str) -> DcpMetadata:
    """Return the metadata in a `.metadata` file; ForeignFormat names the file and what is not allowed in it."""
    try:
        loaded = _Unpickler(data).load()
        if not isinstance(loaded, metadata.Metadata) or not isinstance(loaded.state_dict_metadata, dict):
            raise ForeignFormat(f"{name}: holds no metadata of DCP")
        if not isinstance(loaded.storage_data, dict):
            raise ForeignFormat(f"{name}: does not say where its data lies")
        places = {
            (index.fqn, None if index.offset is None else tuple(index.offset)): info
            for index, info in loaded.storage_data.items()
        }
        return DcpMetadata(entries=loaded.state_dict_metadata, places=places, paths=loaded.planner_data)
    except _Forbidden as error:
        raise ForeignFormat(f"{name}: its pickle names {error}, which DCP does not write; it is not loaded") from error
    except ForeignFormat:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ForeignFormat(f"{name}: is damaged, or not what DCP writes: {type(error).__name__}: {error}") from error


class _Forbidden(Exception):
    """The pickle names something that is not on the list."""


class _Unpickler(pickle.Unpickler):
    """Gives out only classes that hold values, as copies of its own: a pickle can set attributes of what it names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._given: dict[tuple[str, str], Any] = {
            (module, name): type(name, (known,), {}) for (module, name), known in _CLASSES.items()
        }
        self._given["torch", "Size"] = torch.Size
        self._given["collections", "OrderedDict"] = collections.OrderedDict
        self._given["torch.serialization", "_get_layout"] = lambda name: _one_of(name, {"torch.strided": torch.strided})
        self._given[metadata.__name__, "_MEM_FORMAT_ENCODING"] = _memory_format
        self._given["builtins", "getattr"] = _member

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that is on the list."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in self._given:
            raise _Forbidden(f"{module}.{name}")
        return self._given[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: metadata refers to nothing outside."""
        raise _Forbidden("something outside of it")


def _memory_format(value: Any) -> Any:
    return _one_of(value, _FORMATS)


def _member(of: Any, name: Any) -> Any:
    """Return a memory format by its name, as Python 3.11.2 writes members of enumerations; no other attribute."""
    if of is not _memory_format:
        raise _Forbidden("builtins.getattr")
    return _one_of(name, metadata._MEM_FORMAT_ENCODING.__members__)


def _one_of(value: Any, known: Mapping[Any, Any]) -> Any:
    if value not in known:
        raise _Forbidden(repr(value))
    return known[value]
