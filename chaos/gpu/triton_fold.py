# mypy: ignore-errors
"""The ordered fold as one kernel, to compare with the loop. Imported only where Triton is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _add_in_order(rows, out, number, count, stride, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.load(rows + at, mask=inside).to(tl.float32)
    for row in range(1, number):
        total = total + tl.load(rows + row * stride + at, mask=inside).to(tl.float32)
    tl.store(out + at, total, mask=inside)


def fold(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the sum of a matrix's rows in float32, added in order. `row * stride` must stay below 2**31 elements."""
    number, count = rows.shape
    assert number * rows.stride(0) < 1 << 31
    _add_in_order[(triton.cdiv(count, BLOCK),)](rows, out, number, count, rows.stride(0), block=BLOCK)
    return out
