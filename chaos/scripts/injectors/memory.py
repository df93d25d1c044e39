"""Bits that change in memory, and memory that runs out."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import NoReturn

import torch

from chaos.gpu.emulated_device import EmulatedDevice
from chaos.scripts.injectors.fault import Fault
from elastic3d.parallel.state import local

ROOM = 16 << 20
"""Bytes that a process may still map."""


def short(fault: Fault) -> None:
    """Be refused by the kernel, once: what this process may map is bounded by little more than it has."""
    mapped = re.search(r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert mapped is not None
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((int(mapped[1]) << 10) + ROOM, before[1]))
    try:
        torch.empty(4 * ROOM, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def full(device: EmulatedDevice) -> NoReturn:
    """Raise what torch's allocator raises when a little more is asked for than there is on a device.

    Its words, and the type of the error, are those of CUDA's caching allocator in torch 2.13.
    """
    free, size = device.free(), 1 << 20
    asked, total, index = free / size + 0.01, device.facts(1).memory / (1 << 30), device.index
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked:.2f} MiB. GPU {index} has a total capacity of {total:.2f} GiB "
        f"of which {free / size:.2f} MiB is free."
    )


def rest(fault: Fault) -> None:
    """Flip a bit of the first parameter."""
    assert fault.optimizer is not None
    # What this rank holds of it, and not the whole one of the pass; past torch's count of writes, as memory does it.
    parameter = next(one for group in fault.optimizer.param_groups for one in group["params"] if local(one).numel())
    local(parameter).data.view(-1)[:1].view(torch.int32)[0] ^= 1 << 12
