"""torch's tensors in terms of the format: names of dtypes, and bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

from checkpointing.format.tiles import ITEMSIZE, Piece, TensorSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
"""Every dtype that both the format and this torch have, by the format's name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype, None if it has none."""
    return _NAMES.get(dtype)


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, writable; no copy is made."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


def tensor_of(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor over writable bytes; no copy is made."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=DTYPES[dtype]).reshape(shape)


def object_piece(key: str, data: bytes) -> Piece:
    """Return an object's bytes as a tensor of uint8."""
    spec = TensorSpec(key=key, dtype="uint8", shape=(len(data),))
    return Piece(spec=spec, box=spec.box, data=memoryview(data))


def shown(name: str) -> str:
    """Return a name for people: on one line, and only the beginning of a long one."""
    whole = name if name.isprintable() else ascii(name)
    return whole if len(whole) <= 200 else f"{whole[:200]}..."


def shortened(lines: list[str]) -> str:
    """Return the first of many lines as one."""
    return "; ".join(lines[:8]) + ("; ..." if len(lines) > 8 else "")
