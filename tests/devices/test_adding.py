"""Adding rows in order: the bits of one addition after the other, however a device makes them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.devices import device_at

KINDS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


def one_by_one(total: torch.Tensor, rows: torch.Tensor, begins: bool) -> torch.Tensor:
    """Return what the promise is about: each row added by itself."""
    total = total.clone()
    for number, row in enumerate(rows):
        if begins and number == 0:
            total.copy_(row)
        else:
            total += row
    return total


def made(summed: torch.dtype, sent: torch.dtype, rows: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a vector and rows whose sum depends on the order, with a few values that addition treats apart."""
    drawn = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, size, generator=drawn) * torch.logspace(-4, 4, rows).unsqueeze(1)
    total = torch.randn(size, generator=drawn)
    if size >= 4:
        matrix[:, 0] = -0.0
        matrix[rows // 2, 1] = math.inf
        matrix[-1, 2] = math.nan
        total[3] = 1e-40
    return total.to(summed), matrix.to(sent)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether bits are the same, but those of a NaN, which processors write as they like."""
    numbers = ~one.isnan()
    views = [tensor[numbers].contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(numbers, ~other.isnan()) and torch.equal(*views)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KINDS), st.integers(1, 9), st.sampled_from([1, 5, 1000, 70_000]), st.booleans(), st.integers(0, 99)
)
def test_rows_are_added_one_after_the_other(
    kind: tuple[torch.dtype, torch.dtype], rows: int, size: int, begins: bool, seed: int
) -> None:
    """In whatever dtype they come, and whether the sum begins with them or goes on."""
    total, matrix = made(*kind, rows, size, seed)
    expected = one_by_one(total, matrix, begins)
    device_at("cpu", 0).add_rows(total, matrix, begins)
    assert same(total, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("begins", [True, False])
def test_a_gpu_adds_rows_as_the_host_does(kind: tuple[torch.dtype, torch.dtype], begins: bool) -> None:
    """By Triton's kernel and without it, for few rows and many, and sizes that fill no block."""
    from elastic3d.devices import cuda, row_kernel

    device = device_at("cuda", 0)
    device.open()
    for rows, size in ((1, 1), (2, 1000), (64, 70_001)):
        total, matrix = made(*kind, rows, size, seed=rows)
        expected = one_by_one(total, matrix, begins)
        ways = [device.add_rows, cuda.add_rows, *([row_kernel.add_rows] if kind[0] == torch.float32 else [])]
        for way in ways:
            there = total.cuda()
            way(there, matrix.cuda(), begins)
            assert same(there.cpu(), expected)
