"""Bytes of any dtype as numbers: dtypes that numpy does not have are widened exactly, never rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_NATIVE = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "complex128": "<c16", "complex64": "<c8",
    "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint64": "<u8", "uint32": "<u4", "uint16": "<u2", "uint8": "u1", "bool": "?",
    # Two values in a byte, which torch does not separate either.
    "float4_e2m1fn_x2": "u1",
}  # fmt: skip

# (exponent bits, mantissa bits, bias, has infinities, only one NaN and no negative zero)
_SMALL = {
    "float8_e4m3fn": (4, 3, 7, False, False),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, True),
    "float8_e5m2fnuz": (5, 2, 16, False, True),
}


def widened(dtype: str) -> str | None:
    """Return the numpy dtype that values of `dtype` are widened to, None if numpy has the dtype itself."""
    if dtype in _NATIVE:
        return None
    return "complex64" if dtype == "complex32" else "float32"


def array(dtype: str, data: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """Return the elements in `data`, flat; a view of it if numpy has the dtype."""
    if dtype in _NATIVE:
        return np.frombuffer(data, dtype=_NATIVE[dtype])
    if dtype == "bfloat16":
        widened_bits = np.frombuffer(data, dtype="<u2").astype("<u4") << np.uint32(16)
        return np.frombuffer(widened_bits.data, dtype="<f4")
    if dtype == "complex32":
        return np.frombuffer(data, dtype="<f2").astype("<f4").view("<c8")
    values: npt.NDArray[Any] = np.take(_table(dtype), np.frombuffer(data, dtype="u1"))
    return values


def _table(dtype: str) -> npt.NDArray[Any]:
    """Return the value of each of the 256 bytes."""
    if dtype == "float8_e8m0fnu":
        powers: npt.NDArray[Any] = np.full(256, np.nan, dtype="<f4")
        powers[:255] = np.ldexp(np.float32(1.0), np.arange(255) - 127)
        return powers
    exponent_bits, mantissa_bits, bias, infinities, single = _SMALL[dtype]
    codes = np.arange(256)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    scale = np.maximum(exponent, 1) - bias - mantissa_bits
    values: npt.NDArray[Any] = np.ldexp(
        (mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)).astype("<f4"), scale
    ).astype("<f4")
    if infinities:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    elif not single:
        values[(codes & 0x7F) == 0x7F] = np.nan
    values = np.where(codes >> 7, -values, values).astype("<f4")
    if single:
        values[0x80] = np.nan
    return values
