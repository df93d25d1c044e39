"""Measurements of one device: products of matrices, and copies within its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from elastic3d.clock import SYSTEM
from elastic3d.devices.cpu import host_memory, processor
from elastic3d.planner.devices import Number

PRODUCTS = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
LEAST, MOST = 3, 100


def products(device: torch.device, number: Number, *, seconds: float, sizes: Sequence[int] = ()) -> float:
    """Return the FLOP/s of the best of some square products in `number`, measured for `seconds` in all."""
    tried = sizes or PRODUCTS[device.type]
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = number is Number.TF32
    try:
        return max(_product(device, number, size, seconds / len(tried)) for size in tried)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _product(device: torch.device, number: Number, size: int, seconds: float) -> float:
    dtype = {Number.BF16: torch.bfloat16, Number.FP16: torch.float16}.get(number, torch.float32)
    one = torch.randn(size, size, device=device).to(dtype)
    other = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / typical(lambda: torch.mm(one, other, out=out), device, seconds)


def memory_bandwidth(device: torch.device, *, seconds: float, count: int = 0) -> float:
    """Return the bytes per second that are read and written when `count` bytes are copied from one place to another."""
    count = count or COPIED[device.type]
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.zeros(count, dtype=torch.uint8, device=device)
    return 2.0 * count / typical(lambda: target.copy_(source), device, seconds)


def memory(device: torch.device, slots: int) -> int:
    """Return the bytes of memory of one device; of CPU slots, each one's share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory() // slots


def name(device: torch.device) -> str:
    """Return the device's name from its maker."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor()


def typical(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the median time of `work`, repeated for about `seconds`."""
    times: list[float] = []
    work()
    _wait(device)
    ends = SYSTEM.monotonic() + seconds
    while len(times) < LEAST or (SYSTEM.monotonic() < ends and len(times) < MOST):
        start = SYSTEM.monotonic()
        work()
        _wait(device)
        times.append(SYSTEM.monotonic() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
