"""Values of a state dict that are neither tensors nor JSON, as JSON all the same: no pickle, and no code is executed.

A value that JSON does not know is an object with the key `$`, which says what it is. Known are bytes, tuples, sets,
numbers of every kind, dicts with any of these as keys, numpy's arrays and scalars (in numpy's own format, without
pickles), `io.BytesIO`, dates and times, paths, members of enums, and tensors, dtypes and devices inside these. An
enum's class is looked up among the modules that are already imported; none is imported for it.
"""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import io
import math
import pathlib
import struct
import sys
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from checkpointing.interchange.tensors import DTYPES, buffer_of, dtype_name, tensor_of

TAG = "$"
_DEEP = 100


class NoPlainForm(ValueError):
    """The value's class has no form here; the message names the class."""


class NotHere(ValueError):
    """This process cannot make the written value again; the message says what is missing."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value in a form for JSON; NoPlainForm names the class of a value that cannot be kept."""
    if depth > _DEEP:
        raise NoPlainForm(f"values nested more than {_DEEP} deep, or that contain themselves")
    if isinstance(value, enum.Enum):
        return _enum(value)
    kind = type(value)
    if kind in (list, dict, collections.OrderedDict) or kind in _GROUPS.values():
        return _container(value, kind, depth + 1)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    if isinstance(value, np.generic):
        return {TAG: "scalar", "npy": _npy(np.asarray(value))}
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    raise NoPlainForm(name_of_class(kind))


def decode(tree: Any) -> Any:
    """Return the value that `encode` wrote; NotHere if this process lacks something, other errors for damage."""
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TAG not in tree:
        return {key: decode(item) for key, item in tree.items()}
    tag = tree[TAG]
    if tag in _GROUPS:
        return _GROUPS[tag](decode(item) for item in tree["items"])
    if tag in ("dict", "ordered"):
        pairs = [(decode(key), decode(item)) for key, item in tree["items"]]
        return dict(pairs) if tag == "dict" else collections.OrderedDict(pairs)
    if tag not in _DECODERS:
        raise NotHere(f"{tag!r} is of a newer version; upgrade to load it")
    return _DECODERS[tag](tree)


def name_of_class(kind: type) -> str:
    """Return a class's module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


_GROUPS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}


def _container(value: Any, kind: type, depth: int) -> Any:
    if kind is list:
        return [encode(item, depth) for item in value]
    if kind in (dict, collections.OrderedDict):
        if kind is dict and TAG not in value and all(type(key) is str and _encodable(key) for key in value):
            return {key: encode(item, depth) for key, item in value.items()}
        items = [[encode(key, depth), encode(item, depth)] for key, item in value.items()]
        return {TAG: "dict" if kind is dict else "ordered", "items": items}
    tag = next(tag for tag, group in _GROUPS.items() if group is kind)
    items = [encode(item, depth) for item in value]
    return {TAG: tag, "items": sorted(items, key=repr) if kind in (set, frozenset) else items}


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: str) -> Any:
    return value if _encodable(value) else {TAG: "text", "data": _base64(value.encode("utf-8", "surrogatepass"))}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "data": _base64(struct.pack("<d", value))}


def _base64(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _npy(array: Any) -> str:
    out = io.BytesIO()
    try:
        np.lib.format.write_array(out, array, allow_pickle=False)
    except ValueError as error:
        raise NoPlainForm(f"numpy.ndarray of {array.dtype}: {error}") from error
    if _array(out.getvalue()).dtype != array.dtype:
        raise NoPlainForm(f"numpy.ndarray of {array.dtype}, which numpy's own format does not know")
    return _base64(out.getvalue())


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _enum(value: enum.Enum) -> Any:
    kind = type(value)
    place = {TAG: "enum", "module": kind.__module__, "class": kind.__qualname__}
    if _class(kind.__module__, kind.__qualname__) is not kind:
        raise NoPlainForm(f"{name_of_class(kind)}, which is not found under its own name")
    if value.name in kind.__members__:
        return {**place, "name": value.name}
    return {**place, "value": encode(value.value)}  # several flags at once


def _class(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, "__dict__", {}).get(part)
    return value


def _member(tree: Mapping[str, Any]) -> enum.Enum:
    kind = _class(tree["module"], tree["class"])
    if not isinstance(kind, enum.EnumMeta):
        raise NotHere(f"the enum {tree['module']}.{tree['class']} is not there; import its module before you load")
    if "value" in tree:
        member: enum.Enum = kind(decode(tree["value"]))
        return member
    if tree["name"] not in kind.__members__:
        raise NotHere(f"the enum {tree['module']}.{tree['class']} has no {tree['name']} any more")
    return kind.__members__[tree["name"]]


def _tensor(value: torch.Tensor) -> Any:
    dtype = dtype_name(value.dtype)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or dtype is None or value.layout is not torch.strided:
        raise NoPlainForm(f"{name_of_class(type(value))} of {value.layout} {value.dtype}")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "data": _base64(buffer_of(plain))}


def _zone(value: datetime.tzinfo | None) -> Any:
    if value is None:
        return None
    if type(value) is datetime.timezone:
        return value.utcoffset(None).total_seconds()
    if type(value) is zoneinfo.ZoneInfo and value.key is not None:
        return value.key
    raise NoPlainForm(name_of_class(type(value)))


def _in_zone(zone: Any) -> datetime.tzinfo | None:
    if zone is None:
        return None
    return zoneinfo.ZoneInfo(zone) if isinstance(zone, str) else datetime.timezone(datetime.timedelta(seconds=zone))


def _moment(value: datetime.datetime | datetime.time) -> Any:
    bare = value.replace(tzinfo=None)
    tag = "datetime" if isinstance(value, datetime.datetime) else "time"
    return {TAG: tag, "iso": bare.isoformat(), "fold": value.fold, "zone": _zone(value.tzinfo)}


def _dtype(tree: Mapping[str, Any]) -> torch.dtype:
    dtype = getattr(torch, tree["name"], None)
    if not isinstance(dtype, torch.dtype):
        raise NotHere(f"this torch has no {tree['name']}; upgrade it")
    return dtype


def _known(dtype: str) -> str:
    if dtype not in DTYPES:
        raise NotHere(f"this torch has no {dtype}; upgrade it")
    return dtype


def _buffer(tree: Mapping[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO(_bytes(tree["data"]))
    buffer.seek(tree["at"])
    return buffer


_ENCODERS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value,
    str: _text,
    float: _float,
    complex: lambda value: {TAG: "complex", "data": _base64(struct.pack("<dd", value.real, value.imag))},
    bytes: lambda value: {TAG: "bytes", "data": _base64(value)},
    bytearray: lambda value: {TAG: "bytearray", "data": _base64(value)},
    io.BytesIO: lambda value: {TAG: "file", "data": _base64(value.getvalue()), "at": value.tell()},
    np.ndarray: lambda value: {TAG: "array", "npy": _npy(value)},
    datetime.datetime: _moment,
    datetime.time: _moment,
    datetime.date: lambda value: {TAG: "date", "iso": value.isoformat()},
    datetime.timedelta: lambda value: {TAG: "timedelta", "parts": [value.days, value.seconds, value.microseconds]},
    datetime.timezone: lambda value: {TAG: "zone", "zone": _zone(value)},
    zoneinfo.ZoneInfo: lambda value: {TAG: "zone", "zone": _zone(value)},
    type(pathlib.Path()): lambda value: {TAG: "path", "text": str(value)},
    pathlib.PurePosixPath: lambda value: {TAG: "posix", "text": str(value)},
    pathlib.PureWindowsPath: lambda value: {TAG: "windows", "text": str(value)},
    torch.dtype: lambda value: {TAG: "dtype", "name": str(value).removeprefix("torch.")},
    torch.device: lambda value: {TAG: "device", "name": str(value)},
}

_DECODERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "text": lambda tree: _bytes(tree["data"]).decode("utf-8", "surrogatepass"),
    "float": lambda tree: struct.unpack("<d", _bytes(tree["data"]))[0],
    "complex": lambda tree: complex(*struct.unpack("<dd", _bytes(tree["data"]))),
    "bytes": lambda tree: _bytes(tree["data"]),
    "bytearray": lambda tree: bytearray(_bytes(tree["data"])),
    "file": _buffer,
    "array": lambda tree: _array(_bytes(tree["npy"])),
    "scalar": lambda tree: _array(_bytes(tree["npy"]))[()],
    "datetime": lambda tree: datetime.datetime.fromisoformat(tree["iso"]).replace(
        fold=tree["fold"], tzinfo=_in_zone(tree["zone"])
    ),
    "time": lambda tree: datetime.time.fromisoformat(tree["iso"]).replace(
        fold=tree["fold"], tzinfo=_in_zone(tree["zone"])
    ),
    "date": lambda tree: datetime.date.fromisoformat(tree["iso"]),
    "timedelta": lambda tree: datetime.timedelta(*tree["parts"]),
    "zone": lambda tree: _in_zone(tree["zone"]),
    "path": lambda tree: pathlib.Path(tree["text"]),
    "posix": lambda tree: pathlib.PurePosixPath(tree["text"]),
    "windows": lambda tree: pathlib.PureWindowsPath(tree["text"]),
    "dtype": _dtype,
    "device": lambda tree: torch.device(tree["name"]),
    "enum": _member,
    "tensor": lambda tree: tensor_of(bytearray(_bytes(tree["data"])), _known(tree["dtype"]), tuple(tree["shape"])),
}
