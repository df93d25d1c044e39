"""Adding the rows of a matrix onto a vector in one kernel, in the order of the rows.

A kernel per row reads and writes the sum once for each; this one keeps it in registers, so that the sum is read and
written once for all rows. Each number is added up by one thread, and there is nothing but additions in it, so that the
bits are those of the rows added one after the other.

Importing this needs Triton, which comes with torch's builds for CUDA and ROCm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add_rows(total, rows, size, number, step, BEGINS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Add `number` rows, besides the first if the sum begins with it, `step` numbers apart."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = rows + at
    if BEGINS:
        value = tl.load(row, mask=inside, other=0.0).to(tl.float32)
        row += step
    else:
        value = tl.load(total + at, mask=inside, other=0.0)
    for _ in range(number):
        value += tl.load(row, mask=inside, other=0.0).to(tl.float32)
        row += step
    tl.store(total + at, value, mask=inside)


def add_rows(total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
    """Add rows as `elastic3d.devices.ComputeDevice.add_rows` does; total is float32, and contiguous as each row is."""
    size = total.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _add_rows[grid](total, rows, size, len(rows) - begins, rows.stride(0), BEGINS=begins, BLOCK=BLOCK)
