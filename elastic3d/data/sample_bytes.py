"""Samples as bytes and back, the same to the last bit, without pickle: nothing that is read can run code.

A sample is made of tensors, numpy arrays and scalars, numbers, strings, bytes and None, in tuples, lists and
dictionaries. `torch.save` would do for most of it, but takes longer than many transforms, and knows numpy only as
pickle; safetensors knows tensors alone, without their strides, which decide in which memory format a `collate` joins
images, and with that the bits of a convolution.

    8 bytes       length of the outline
    the outline   JSON, one node for each part of the sample; tensors and arrays say where their bytes are
    the rest      those bytes, each beginning at a multiple of 64 from the beginning of all
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np
import torch

ALIGNED: Final = 64

_LENGTH: Final = struct.Struct("<Q")
_DTYPES: Final = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
        *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
_ARRAYS: Final = "biufcmMSU"
"""Kinds of numpy's dtypes whose bytes are all there is of them."""


class Unstorable(Exception):
    """A sample has a part that would not come back the same. Never leaves this package."""


def encoded(sample: Any) -> bytes:
    """Return a sample as bytes: equal ones for equal samples; Unstorable for what would not come back the same."""
    chunks: list[bytes] = []
    outline = json.dumps(_Writer(chunks).node(sample, "the sample"), separators=(",", ":")).encode()
    head = _LENGTH.pack(len(outline)) + outline
    return b"".join((head, bytes(-len(head) % ALIGNED), *chunks))


def decoded(data: torch.Tensor) -> Any:
    """Return the sample in `data`, 1-D uint8, which its tensors and arrays share. Only for what `encoded` has made."""
    flat = data.numpy().data
    (length,) = _LENGTH.unpack_from(flat)
    begin = _LENGTH.size + length
    begin += -begin % ALIGNED
    return _read(json.loads(bytes(flat[_LENGTH.size : _LENGTH.size + length])), data[begin:])


class _Writer:
    """Makes nodes, and adds the bytes of those that have any to `chunks`."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks, self._at = chunks, 0

    def node(self, value: Any, where: str) -> Any:
        """Return the node of a part. Classes are compared exactly: others would come back as what they derive from."""
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= 64):
            return value
        if kind is float:
            return ["float", struct.pack("<d", value).hex()]
        if kind is bytes:
            return ["bytes", self._add(value), len(value)]
        if kind in (list, tuple):
            return [kind.__name__, [self.node(part, f"part {at} of {where}") for at, part in enumerate(value)]]
        if kind is dict:
            parts = value.items()
            return ["dict", [[self.node(key, where), self.node(part, f"{key!r} of {where}")] for key, part in parts]]
        if kind is torch.Tensor:
            return self._tensor(value, where)
        if kind is np.ndarray and _plain(value.dtype):
            copy = value.copy(order="K")
            at = self._add(copy.ravel(order="K").tobytes())
            return ["array", copy.dtype.str, list(copy.shape), list(copy.strides), at, copy.nbytes]
        if isinstance(value, np.generic) and _plain(value.dtype) and kind is value.dtype.type:
            return ["scalar", value.dtype.str, value.tobytes().hex()]
        raise Unstorable(
            f"{where} is {kind.__module__}.{kind.__qualname__}"
            + (f" of {value.dtype}" if isinstance(value, np.ndarray | np.generic) else "")
        )

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        plain = value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
        if not plain or str(value.dtype) not in _DTYPES or value.is_conj() or value.is_neg():
            raise Unstorable(
                f"{where} is a tensor of {value.dtype} on {value.device}, {value.layout}, requires_grad="
                f"{value.requires_grad}; a plain one on the CPU is kept"
            )
        # Dense, with its dimensions in the same order in memory: `stack` takes a batch's memory format from that.
        dense = value.clone(memory_format=torch.preserve_format)
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return ["tensor", str(value.dtype), list(dense.shape), list(dense.stride()), self._add(flat), len(flat)]

    def _add(self, data: bytes) -> int:
        at = self._at
        padding = bytes(-len(data) % ALIGNED)
        self._chunks += [data, padding]
        self._at += len(data) + len(padding)
        return at


def _plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _ARRAYS and dtype.itemsize > 0


def _read(node: Any, data: torch.Tensor) -> Any:
    if not isinstance(node, list):
        return node
    kind, *rest = node
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(rest[0]))[0]
    if kind == "bytes":
        at, size = rest
        return data[at : at + size].numpy().tobytes()
    if kind in ("list", "tuple"):
        parts = [_read(part, data) for part in rest[0]]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {_read(key, data): _read(part, data) for key, part in rest[0]}
    if kind == "scalar":
        return np.frombuffer(bytes.fromhex(rest[1]), dtype=np.dtype(rest[0]))[0]
    dtype, shape, strides, at, size = rest
    if kind == "tensor":
        if not size:
            return torch.empty_strided(shape, strides, dtype=_DTYPES[dtype])
        return data[at : at + size].view(_DTYPES[dtype]).as_strided(shape, strides)
    array: Any = np.ndarray(shape, np.dtype(dtype), data[at : at + size].numpy(), 0, strides)
    return array
