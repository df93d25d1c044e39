"""Inline statistics of a tile, for people who look at a checkpoint without loading it (format.md, section 2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_KINDS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_ROW = 1024
_BLOCK = 64 * _ROW

Stats = list[Any] | None


def statistics(dtype: str, data: memoryview) -> Stats:
    """Return `[min, max, mean square, NaN count]` as JSON data, None if it has no floats or no elements."""
    kind = _KINDS.get(dtype)
    if kind is None or not data.nbytes:
        return None
    values: npt.NDArray[Any] = np.frombuffer(data, dtype=kind)
    low, high, total, nans = math.inf, -math.inf, 0.0, 0
    with np.errstate(over="ignore"):
        # Block by block, so that each is widened and read three times while it is in the nearest cache.
        for start in range(0, values.size, _BLOCK):
            block = _widened(dtype, values[start : start + _BLOCK])
            least = float(block.min())
            if math.isnan(least):
                missing = np.isnan(block)
                nans += int(missing.sum())
                block = block[~missing]
                if not block.size:
                    continue
                least = float(block.min())
            low, high = min(low, least), max(high, float(block.max()))
            total += _squares(block)
    count = values.size - nans
    return [_number(low), _number(high), _number(total / count), nans] if count else [None, None, None, nans]


def _widened(dtype: str, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return (block.astype("<u4") << 16).view("<f4")
    return block.astype("<f4") if dtype == "float16" else block


def _squares(values: npt.NDArray[Any]) -> float:
    # Rows are squared in the tile's own precision, which is fast, and summed in double; large values, whose squares do
    # not fit, are squared in double.
    whole = values[: values.size // _ROW * _ROW].reshape(-1, _ROW)
    rest = values[whole.size :].astype("<f8")
    total = np.einsum("ij,ij->i", whole, whole).sum(dtype="<f8") + (rest * rest).sum()
    if not math.isfinite(total) and values.dtype != np.dtype("<f8"):
        wide = values.astype("<f8")
        total = (wide * wide).sum()
    return float(total)


def _number(value: Any) -> float | str:
    number = float(f"{float(value):.6g}")
    if math.isfinite(number):
        return number
    return "inf" if number > 0 else "-inf"
