"""Out of memory: is that what ended a trainer, and who held what was missing?"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic3d.shortfall import STANDBY

OF_DEVICES = ("out of memory", "_STATUS_ALLOC_FAILED", "_DEVICE_ALLOCATION_FAILED")
"""In errors that are no `OutOfMemoryError`: of NCCL; of cuBLAS, cuSOLVER and cuDNN; of cuDNN from version 9 on."""

OF_HOSTS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "_HOST_ALLOCATION_FAILED")
"""The same of torch's allocator on the host, of C++, and of cuDNN from version 9 on."""

UNSAID = "could not create a primitive"
"""In oneDNN's errors, whatever the reason: that memory ran out is one of them."""

LITTLE = 64 << 20
"""Bytes below which what a process may still have is as good as nothing."""

MOST = 5
"""Processes that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Who holds a device's memory, in bytes; what is neither ours nor free, other processes hold."""

    device: str
    """As torch names it."""
    total: int
    """All of its memory."""
    free: int
    """What nobody holds."""
    tensors: int = 0
    """Held by this process's tensors."""
    cached: int = 0
    """Kept by this process's allocator beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that uses a device."""

    pid: int
    command: str


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether this error, or one that caused it, says that memory ran out, on a device or on the host."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(seen, (RuntimeError, OSError)) and any(words in str(seen) for words in (*OF_DEVICES, *OF_HOSTS)):
            return True
        if isinstance(seen, RuntimeError) and UNSAID in str(seen) and left() < LITTLE:
            return True
        seen = seen.__cause__
    return False


def asked(error: BaseException) -> int:
    """Return the bytes that an error says could not be had, in the words of torch's allocators; 0 if it does not."""
    seen: BaseException | None = error
    while seen is not None:
        if said := _ASKED.search(str(seen)):
            return int(float(said[1]) * _UNITS[said[2]])
        seen = seen.__cause__
    return 0


def of_host(error: BaseException) -> bool:
    """Return whether it was the host's memory that ran out; the error says that some did."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            return False
        if isinstance(seen, MemoryError | OSError) or any(words in str(seen) for words in (*OF_HOSTS, UNSAID)):
            return True
        seen = seen.__cause__
    return False


def left() -> float:
    """Return the bytes that this process may still have by its own limits (`ulimit -d`, `ulimit -v`), inf for any."""
    limits = (("VmData", resource.RLIMIT_DATA), ("VmSize", resource.RLIMIT_AS))
    bounds = {field: resource.getrlimit(limit)[0] for field, limit in limits}
    if set(bounds.values()) == {resource.RLIM_INFINITY}:
        return math.inf
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = {
        field: int(kilobytes) << 10 for field, kilobytes in re.findall(r"^(Vm\w+):\s+(\d+) kB$", status, re.MULTILINE)
    }
    return min(
        (bound - held[field] for field, bound in bounds.items() if bound != resource.RLIM_INFINITY and field in held),
        default=math.inf,
    )


_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def describe(use: DeviceUse, others: Iterable[Holder]) -> str:
    """Return in words who holds a device's memory. others: the processes beside this one that have it open."""
    own = use.tensors + use.cached
    parts = [f"{_size(use.tensors)} in this trainer's tensors, {_size(use.cached)} cached beside them"]
    rest = max(0, use.total - use.free - own)
    names = [f"pid {one.pid} {one.command}" for one in others]
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    parts.append(
        f"{_size(rest)} in contexts and other processes ({', '.join(names[:MOST])}{more})"
        if names
        else f"{_size(rest)} in this process's context, or in processes that cannot be seen from here"
    )
    return f"{use.device} has {_size(use.total)}: {', '.join(parts)}, {_size(use.free)} free"


def holders(files: Iterable[str], proc: Path = Path("/proc")) -> Iterator[Holder]:
    """Yield the processes, but for this one, that have one of these device files open, as far as they can be seen."""
    wanted = set(files)
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if int(folder.name) == os.getpid():
            continue
        try:
            if any(os.readlink(link) in wanted for link in (folder / "fd").iterdir()):
                yield Holder(pid=int(folder.name), command=_command(folder))
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else


def _command(folder: Path) -> str:
    if (folder / "comm").read_text().strip() == STANDBY:
        return "the standby of the next trainer; --rdzv-conf=standby=off does without"
    words = (folder / "cmdline").read_bytes().split(b"\0")
    return b" ".join(words[:3]).decode(errors="replace").strip()[:80]


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
