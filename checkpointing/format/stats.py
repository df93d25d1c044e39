"""Inline statistics of a tile, for people who look at a checkpoint without loading it (format.md, section 2)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_KINDS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_ROW = 1024

Stats = list[Any] | None


def statistics(dtype: str, data: memoryview) -> Stats:
    """Return `[min, max, mean square, NaN count]` as JSON data, None for what is not a float or has no element."""
    kind = _KINDS.get(dtype)
    if kind is None or not data.nbytes:
        return None
    values: npt.NDArray[Any] = np.frombuffer(data, dtype=kind)
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    elif dtype == "float16":
        values = values.astype("<f4")
    low, high, nans = values.min(), values.max(), 0
    if math.isnan(low):
        missing = np.isnan(values)
        nans = int(missing.sum())
        values = values[~missing]
        if not values.size:
            return [None, None, None, nans]
        low, high = values.min(), values.max()
    return [_number(low), _number(high), _number(_mean_square(values)), nans]


def _mean_square(values: npt.NDArray[Any]) -> float:
    # Rows are squared in the tile's own precision, which is fast, and summed in double; large values, whose
    # squares do not fit, take the slow way.
    with np.errstate(over="ignore"):
        whole = values[: values.size // _ROW * _ROW].reshape(-1, _ROW)
        rest = values[whole.size :].astype("<f8")
        total = np.einsum("ij,ij->i", whole, whole).sum(dtype="<f8") + (rest * rest).sum()
        if not math.isfinite(total) and values.dtype != np.dtype("<f8"):
            wide = values.astype("<f8")
            total = (wide * wide).sum()
    return float(total) / values.size


def _number(value: Any) -> float | str:
    number = float(f"{float(value):.6g}")
    if math.isfinite(number):
        return number
    return "inf" if number > 0 else "-inf"
