"""Sums of squares of the rows of many matrices in one kernel, with the bits of `elastic3d.parallel.norms.fold`.

`fold` halves a row again and again: the second half is added to the first, elementwise. A row of P * R numbers, P a
power of two, is halved log2(P) times before anything depends on R. So it is a matrix of P by R, whose P pieces are
folded in each column by itself. The kernel does that in registers: it reads each gradient once and writes R numbers for
each row, which `fold` brings down to one where R is more than 1. Squares are exact in float64 for gradients of up to 26
bits of mantissa; nothing is contracted with an addition, so that those of float64 have the same bits too.

Importing this needs Triton, which comes with torch's builds for CUDA and ROCm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

PIECES = 4096
"""Most pieces of a row."""

FEWEST = 16
"""With fewer pieces of several numbers, what the kernel leaves is hardly less than what it reads."""

TILE = 8192
"""Numbers that one program holds."""

_KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}


@triton.jit  # type: ignore[untyped-decorator]
def _square_rows(  # type: ignore[no-untyped-def]
    addresses,
    owners,
    firsts,
    out,
    number,
    rest,
    KIND: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    LEVELS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    """Fold ROWS rows in WIDTH of their columns. owners: the matrix of each row. firsts: the row each begins with."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < number
    owner = tl.load(owners + row, mask=there, other=0)
    within = (row - tl.load(firsts + owner, mask=there, other=0)).to(tl.int64)
    address = tl.load(addresses + owner, mask=there, other=0).to(tl.pointer_type(KIND))
    begin = address + within * rest * (1 << LEVELS)
    piece = tl.arange(0, 1 << LEVELS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = there[:, None, None] & (column < rest)[None, None, :]
    at = begin[:, None, None] + piece[None, :, None] * rest + column[None, None, :]
    values = tl.load(at, mask=inside, other=0.0).to(tl.float64)
    values = values * values
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(values, (ROWS, 2, 1 << (LEVELS - 1 - level), WIDTH))
        values = tl.sum(halves, axis=1)
    sums = tl.reshape(values, (ROWS, WIDTH))
    to = row.to(tl.int64)[:, None] * rest + column[None, :]
    tl.store(out + to, sums, mask=there[:, None] & (column < rest)[None, :])


def square_rows(matrices: Sequence[torch.Tensor], fold: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """Return the sums of squares of the rows of matrices of one length and dtype, in order; None if that is not for it.

    fold: finishes rows of float64. The matrices are contiguous, and of one device.
    """
    first = matrices[0]
    length, number = first.shape[1], sum(len(matrix) for matrix in matrices)
    if first.dtype not in _KINDS or not length or not number:
        return None
    pieces = min(length & -length, PIECES)
    rest = length // pieces
    if rest > 1 and pieces < FEWEST:
        return None
    width = min(triton.next_power_of_2(rest), max(1, TILE // pieces))
    rows = max(1, TILE // 4 // (pieces * width))
    owners, firsts = _tables(first.device, tuple(len(matrix) for matrix in matrices))
    pinned = first.device.type != "cpu"
    addresses = torch.tensor([matrix.data_ptr() for matrix in matrices], dtype=torch.int64, pin_memory=pinned)
    out = torch.empty(number, rest, dtype=torch.float64, device=first.device)
    _square_rows[(triton.cdiv(number, rows), triton.cdiv(rest, width))](
        addresses.to(first.device, non_blocking=True),
        owners,
        firsts,
        out,
        number,
        rest,
        KIND=_KINDS[first.dtype],
        ROWS=rows,
        LEVELS=pieces.bit_length() - 1,
        WIDTH=width,
        num_warps=4 if rows * pieces * width <= TILE // 4 else 8,
        enable_fp_fusion=False,
    )
    return out.reshape(-1) if rest == 1 else fold(out)


@functools.lru_cache(maxsize=256)
def _tables(device: torch.device, rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix of each row, and each one's first row; a model asks for the same in each step."""
    counts = torch.tensor(rows)
    owners = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), counts)
    firsts = (counts.cumsum(0) - counts).to(torch.int32)
    return owners.to(device), firsts.to(device)
