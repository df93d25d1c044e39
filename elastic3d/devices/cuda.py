"""NVIDIA's devices, and AMD's in torch's builds for ROCm, which go by the same names there.

What follows from how they work, and where it is kept:

- Work is queued. A tensor has its values when the stream that computes it gets there, so that a copy beside training
  waits for a mark made after the last piece of work it depends on.
- The current device belongs to a thread and is 0 in each new one. A thread that does not enter its device makes a
  context of some hundred MB on device 0 and queues its copies between the training's kernels.
- A copy to pageable memory goes through a buffer of the driver's and blocks at each tensor. Copies go through two
  pinned buffers instead: while one is filled by the device, the other is emptied into the target. Pinning the targets
  themselves would cost more, for each generation maps them anew.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic3d.devices.cpu import copy_from_host
from elastic3d.devices.device import CopyStream, Move
from elastic3d.errors import ConfigurationError
from elastic3d.values import DeviceFacts

PINNED = 64 << 20
"""Bytes of each of the two pinned buffers."""


class CudaDevice:
    """One device, the one of its trainer's slot."""

    kind = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    exclusive = True

    def __init__(self, index: int) -> None:
        self.index = index

    @property
    def torch_device(self) -> torch.device:
        """Return the device by its number."""
        return torch.device("cuda", self.index)

    def installed(self) -> int:
        """Return the number of devices that the driver shows to torch."""
        return torch.cuda.device_count()

    def described(self) -> str:
        """Return what the driver calls it, and its memory."""
        properties = torch.cuda.get_device_properties(self.index)
        return f"{properties.name} of {properties.total_memory / 2**30:.0f} GiB"

    def open(self) -> None:
        """Make the context; ConfigurationError where there is no such device, or the driver does not serve torch."""
        try:
            count = self.installed()
            if self.index >= count:
                raise ConfigurationError(
                    f"slot {self.index} has no device of its own: torch sees {count}. Trying again does not help: "
                    "lower --nproc-per-node, or look at CUDA_VISIBLE_DEVICES and at the driver (nvidia-smi, rocm-smi)"
                )
            torch.cuda.set_device(self.index)
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.empty(1, device=self.torch_device)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"cuda:{self.index} cannot be used: {error}. Bring the driver and torch {torch.__version__} (built "
                f"for {runtime() or 'the CPU alone'}) together, or train on the CPU with elastic3d.run(device='cpu')"
            ) from error

    def enter_thread(self) -> None:
        """Make it the calling thread's current device."""
        torch.cuda.set_device(self.index)

    def place(self, module: nn.Module) -> None:
        """Move what is its own."""
        # By the module's own way of moving, which a model may have extended; not all have torch's `recurse`.
        apply: Any = module._apply
        alone = {"recurse": False} if "recurse" in inspect.signature(apply).parameters else {}
        apply(lambda tensor: tensor.to(self.torch_device), **alone)

    def free(self) -> int:
        """Return what the driver calls free."""
        return int(torch.cuda.mem_get_info(self.index)[0])

    def seed(self, seed: int) -> None:
        """Seed torch's default generator and the device's."""
        torch.default_generator.manual_seed(seed)
        torch.cuda.default_generators[self.index].manual_seed(seed)

    @contextmanager
    def keyed(self, seed: int) -> Iterator[None]:
        """Seed both generators for a while."""
        with torch.random.fork_rng(devices=[self.index], device_type="cuda"):
            self.seed(seed)
            yield

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or a copy that is queued after what made it."""
        return tensor.contiguous()

    def mark(self) -> object:
        """Return an event at the end of what the current stream has been given so far."""
        return torch.cuda.current_stream(self.index).record_event()

    def copy_stream(self) -> CopyStream:
        """Return a stream with its pinned buffers."""
        return CudaCopyStream(self.torch_device)

    def facts(self, slots: int) -> DeviceFacts:
        """Return what the driver says of it."""
        properties = torch.cuda.get_device_properties(self.index)
        free, total = torch.cuda.mem_get_info(self.index)
        return DeviceFacts(
            kind=self.kind,
            name=str(properties.name),
            memory=total,
            reserve=total - free - torch.cuda.memory_reserved(self.index),
            devices=self.installed(),
            torch=str(torch.__version__),
            runtime=runtime(),
            driver=driver(),
            products=_products(),
        )


class CudaCopyStream:
    """One stream for life, of high priority, and two pinned buffers."""

    def __init__(self, device: torch.device, *, nbytes: int = PINNED) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._halves = [_Half(nbytes), _Half(nbytes)]

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Copy the device's tensors through the pinned buffers, and those of the host as they are."""
        on_host: list[Move] = []
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        turn = 0
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            for move in moves:
                if move.tensor.device.type == "cpu":
                    on_host.append(move)
                    continue
                data = move.tensor.reshape(-1).view(torch.uint8)
                done = 0
                while done < data.numel():
                    half = self._halves[turn]
                    if not half.free:
                        half.queued.record(self._stream)
                        turn = 1 - turn
                        half = self._halves[turn]
                        half.empty(base)
                    count = min(half.free, data.numel() - done)
                    half.add(data[done : done + count], move.offset + done)
                    done += count
            self._halves[turn].queued.record(self._stream)
        # The device fills one half while the other is emptied; whatever is on the host needs neither.
        copy_from_host(on_host, target)
        for half in (self._halves[1 - turn], self._halves[turn]):
            half.empty(base)


class _Half:
    """One pinned buffer: what was queued into it, and where in the target that belongs."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._filled = 0
        self._pieces: list[tuple[int, int, int]] = []  # where it is here, where it belongs, how many bytes
        self.queued: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def free(self) -> int:
        """Bytes that can still be queued into it."""
        return self._memory.numel() - self._filled

    def add(self, data: torch.Tensor, offset: int) -> None:
        """Queue a copy of some bytes on the current stream."""
        count = data.numel()
        self._memory[self._filled : self._filled + count].copy_(data, non_blocking=True)
        self._pieces.append((self._filled, offset, count))
        self._filled += count

    def empty(self, base: int) -> None:
        """Wait for what is queued and move it to where it belongs, from the address `base` on."""
        if self._pieces:
            self.queued.synchronize()
        for here, offset, count in self._pieces:
            ctypes.memmove(base + offset, self._memory.data_ptr() + here, count)
        self._pieces.clear()
        self._filled = 0


def runtime() -> str:
    """Return what torch was built for, such as "CUDA 12.8, cuDNN 91002" or "ROCm 6.4"; "" for the CPU alone."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"  # type: ignore[no-untyped-call]
    return ""


def driver(root: Path = Path("/")) -> str:
    """Return the version of the kernel's driver, "" where it does not say."""
    try:
        words = (root / "proc/driver/nvidia/version").read_text().split()
    except OSError:
        try:
            return (root / "sys/module/amdgpu/version").read_text().strip()
        except OSError:
            return ""
    return next((word for word in words if word[:1].isdecimal() and word.count(".") >= 1), "")


def _products() -> str:
    """Return in what torch computes products of float32, which is part of what fixes the bits."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
