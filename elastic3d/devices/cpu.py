"""The host's own processors. Nothing is queued: what a call computes is there when it returns."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import nn
from torch.nn import functional

from elastic3d.control_groups import memory_limits
from elastic3d.devices.device import CopyStream, DeviceLoad, Fold, Move, Stopwatch
from elastic3d.devices.reading import Reading
from elastic3d.values import DeviceFacts

if TYPE_CHECKING:
    import torch.distributed as dist


_AT_ONCE = 4 << 20
"""Bytes that are hashed between two memmoves: each call lets the training have the interpreter, and may wait for it."""


class CpuCopyStream:
    """Moves each tensor by one memmove, which leaves the interpreter to the training.

    No tensor operation runs here: on a second thread it would bring up a second pool of workers, and the number of
    threads is part of what makes bits come out the same.
    """

    hashes = True

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Copy at once; `after` has always been reached."""
        copy_from_host(moves, target)


class CpuDevice:
    """The host's processors, which all slots of a node share."""

    kind = "cpu"
    backend = "gloo"
    exclusive = False
    standby_bytes = 0

    @property
    def torch_device(self) -> torch.device:
        """Return the host."""
        return torch.device("cpu")

    def installed(self) -> int:
        """Return the number of cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def described(self) -> str:
        """Return the processor's name."""
        return processor()

    def open(self) -> None:
        """Do nothing: it is always there."""

    def enter_thread(self) -> None:
        """Do nothing: there is one."""

    def place(self, module: nn.Module) -> None:
        """Do nothing: the host's memory is where modules are built."""

    def free(self) -> int:
        """Return the bytes of the host's memory that are free."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def room(self) -> int:
        """Return the bytes of the host's memory that are free, or all that this container may use."""
        return min(self.free(), host_memory())

    def release(self) -> None:
        """Do nothing: what is not used is the host's at once."""

    def memory_use(self) -> str:
        """Return how much of the host's memory is free."""
        return f"the host has {host_memory() / 2**30:.2f} GiB: {self.free() / 2**30:.2f} GiB free"

    def seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.default_generator.manual_seed(seed)

    def random_state(self) -> bytes:
        """Return the state of torch's default generator."""
        return torch.get_rng_state().numpy().tobytes()

    @contextmanager
    def keyed(self, seed: int) -> Iterator[None]:
        """Seed torch's default generator for a while."""
        with torch.random.fork_rng(devices=[]):
            self.seed(seed)
            yield

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or a contiguous copy."""
        return tensor.contiguous()

    def add_rows(self, total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
        """Add them, in one call where there are several."""
        add_rows(total, rows, begins)

    def square_rows(self, matrices: Sequence[torch.Tensor], fold: Fold) -> None:
        """Return None: fold is made for the host."""

    def begin_reading(self, tensors: Sequence[torch.Tensor]) -> Reading:
        """Read them at once."""
        return Reading(tensors, lambda tensor: True, lambda vector: lambda: vector)

    def mark(self) -> object:
        """Return None: nothing is queued."""
        return None

    def stopwatch(self) -> Stopwatch | None:
        """Return None: the host's clock says how long its work takes."""
        return None

    def copy_stream(self) -> CopyStream:
        """Return what copies by memmove."""
        return CpuCopyStream()

    def load(self, loads: Iterable[DeviceLoad]) -> None:
        """Copy at once."""
        for one in loads:
            one.target.copy_(one.source)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Do nothing: gloo's groups are connected when they are made."""

    def group_error(self, group: dist.ProcessGroup) -> str:
        """Return "": gloo raises what happens."""
        return ""

    def facts(self, slots: int) -> DeviceFacts:
        """Return the processor's name and a slot's share of the host's memory."""
        return DeviceFacts(
            kind=self.kind,
            name=processor(),
            memory=host_memory() // max(1, slots),
            devices=self.installed(),
            torch=str(torch.__version__),
            runtime=kernels(),
        )


def kernels() -> str:
    """Return what torch's kernels are made for here, and a digest of what some of them compute.

    Libraries choose kernels by the processor, each in a way of its own, and sums come out otherwise by them. Makers'
    names of processors say nothing of that, but results do.
    """
    drawn = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=drawn, requires_grad=True) for shape in ((2, 96, 256), (768, 256)))
    with torch.enable_grad():
        q, k, v = (
            functional.linear(functional.layer_norm(x, (256,)), weight).view(2, 96, 3, 4, 64).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = functional.gelu(q @ k.transpose(2, 3)).softmax(-1)
        loss = attended.square().mean() + (scores @ v).tanh().sum() + x.flatten(1).log_softmax(-1).logsumexp(0).mean()
    results = (attended, scores, loss, *torch.autograd.grad(loss, (x, weight)))
    digest = blake3(b"".join(one.detach().contiguous().numpy().tobytes() for one in results)).hexdigest()
    return f"{torch.backends.cpu.get_cpu_capability()}, results {digest[:8]}"


def add_rows(total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
    """Add rows to a vector in the host's memory, in their order.

    On the CPU torch makes the additions of a list one after the other, also those to one and the same vector. On a
    device it would make them at once.
    """
    parts = list(rows.unbind())
    if begins and len(parts) > 1 and rows.dtype == total.dtype:
        torch.add(parts[0], parts[1], out=total)
        parts = parts[2:]
    elif begins:
        total.copy_(parts[0])
        parts = parts[1:]
    if parts:
        torch._foreach_add_([total] * len(parts), parts)


def copy_from_host(moves: Iterable[Move], target: memoryview) -> None:
    """Copy tensors in the host's memory, each by one memmove; what is hashed, by way of memory of this thread's own.

    So a digest is that of the bytes as they were written, whatever happens to the tensor or to the target meanwhile.
    """
    base = ctypes.addressof(ctypes.c_char.from_buffer(target))
    room, between = memoryview(b""), 0
    for move in moves:
        source, to, left = move.tensor.data_ptr() + move.start, base + move.offset, move.length
        if move.hasher is None:
            ctypes.memmove(to, source, left)
            continue
        while left:
            count = min(left, _AT_ONCE)
            if len(room) < count:
                room = memoryview(bytearray(count))
                between = ctypes.addressof(ctypes.c_char.from_buffer(room))
            ctypes.memmove(between, source, count)
            move.hasher.update(room[:count])
            ctypes.memmove(to, between, count)
            source, to, left = source + count, to + count, left - count


def processor() -> str:
    """Return what the processor's maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def host_memory(read: Callable[[str], str] = lambda path: Path(path).read_text()) -> int:
    """Return the bytes of the host's memory, or what this process's control groups let it use of it.

    read: returns a file's text, raises OSError if there is none.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(read)])
