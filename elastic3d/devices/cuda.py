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

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elastic3d.devices.cpu import copy_from_host
from elastic3d.devices.device import PINNED, CopyStream, DeviceLoad, Fold, Move, Stopwatch
from elastic3d.devices.exhaustion import DeviceUse, describe, holders
from elastic3d.devices.movers import Movers
from elastic3d.devices.reading import Reading
from elastic3d.devices.ring import BounceRing, load
from elastic3d.errors import ConfigurationError
from elastic3d.log import process_log
from elastic3d.values import DeviceFacts

if TYPE_CHECKING:
    import torch.distributed as dist

STANDBY = 800 << 20
"""Bytes: on an H200 a process with libraries and kernels loaded, and nothing in its tensors, held 773 MiB."""

SquareRows = Callable[[Sequence[torch.Tensor], Fold], torch.Tensor | None]
AddRows = Callable[[torch.Tensor, torch.Tensor, bool], None]


MOVERS = 4
"""Threads that keep up with the link of a device; more would only take the cores of the training."""


class CudaDevice:
    """One device, the one of its trainer's slot."""

    kind = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    exclusive = True
    standby_bytes = STANDBY

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

    def room(self) -> int:
        """Return what the driver calls free, and what torch's allocator keeps."""
        kept = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return self.free() + kept

    def release(self) -> None:
        """Wait, and empty torch's allocator; the workspaces of products are tensors to it, and are made anew."""
        torch.cuda.synchronize(self.index)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.index)
        torch.cuda.reset_accumulated_memory_stats(self.index)

    def memory_use(self) -> str:
        """Return what torch's allocator and the driver say, and which processes have the device's file open."""
        free, total = torch.cuda.mem_get_info(self.index)
        tensors = torch.cuda.memory_allocated(self.index)
        cached = torch.cuda.memory_reserved(self.index) - tensors
        use = DeviceUse(device=f"cuda:{self.index}", total=total, free=free, tensors=tensors, cached=cached)
        return describe(use, holders(device_files(torch.cuda.get_device_properties(self.index))))

    def seed(self, seed: int) -> None:
        """Seed torch's default generator and the device's."""
        torch.default_generator.manual_seed(seed)
        torch.cuda.default_generators[self.index].manual_seed(seed)

    def random_state(self) -> bytes:
        """Return the states of both generators, which the host keeps."""
        device = torch.cuda.default_generators[self.index].get_state()
        return torch.get_rng_state().numpy().tobytes() + device.numpy().tobytes()

    @contextmanager
    def keyed(self, seed: int) -> Iterator[None]:
        """Seed both generators for a while."""
        with torch.random.fork_rng(devices=[self.index], device_type="cuda"):
            self.seed(seed)
            yield

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or a copy that is queued after what made it."""
        return tensor.contiguous()

    def add_rows(self, total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
        """Queue the additions: one kernel for all rows where there is Triton to make it, else one for each."""
        kernel = _row_kernel(self.index) if total.dtype == torch.float32 else add_rows
        kernel(total, rows, begins)

    def square_rows(self, matrices: Sequence[torch.Tensor], fold: Fold) -> torch.Tensor | None:
        """Queue one kernel for all matrices, where there is Triton to make it and it takes their width."""
        kernel = _square_kernel(self.index)
        return kernel([matrix.contiguous() for matrix in matrices], fold) if kernel else None

    def begin_reading(self, tensors: Sequence[torch.Tensor]) -> Reading:
        """Queue one copy to pinned memory."""
        return Reading(tensors, lambda tensor: tensor.device.type == "cpu", self._begin_copy)

    def _begin_copy(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        room = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
        room.copy_(vector, non_blocking=True)
        copied = torch.cuda.current_stream(self.index).record_event()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return room

        return wait

    def mark(self) -> object:
        """Return an event at the end of what the current stream has been given so far."""
        return torch.cuda.current_stream(self.index).record_event()

    def stopwatch(self) -> Stopwatch:
        """Return one of the current stream, on which the calling thread computes."""
        return CudaStopwatch(torch.cuda.current_stream(self.index))

    def copy_stream(self) -> CopyStream:
        """Return a stream with its pinned buffers."""
        return CudaCopyStream(self.torch_device)

    def load(self, loads: Iterable[DeviceLoad]) -> None:
        """Copy through two pinned buffers on the current stream. torch keeps them for the stream of snapshots."""
        stream = torch.cuda.current_stream(self.index)
        load(loads, _Pinned(PINNED, stream), _Pinned(PINNED, stream), Movers(movers()))

    def connect(self, group: dist.ProcessGroup) -> None:
        """Have NCCL connect the group's ranks, each by its own device.

        From then on what a group's ranks send to single others waits in one line with its collectives: this is not for
        pipelines.
        """
        group._get_backend(self.torch_device).eager_connect_single_device(self.torch_device)

    def group_error(self, group: dist.ProcessGroup) -> str:
        """Return what NCCL's own thread has noted: a failed communicator, a lost rank, or a time limit."""
        error = group._get_backend(self.torch_device).get_error()
        return "" if error.name == "SUCCESS" else f"NCCL reports {error.name}"

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


def add_rows(total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
    """Queue a kernel for each row."""
    if begins:
        total.copy_(rows[0])
    for row in rows[1:] if begins else rows:
        total.add_(row)


@functools.cache
def _row_kernel(index: int) -> AddRows:
    """Return what adds rows to float32 on this device; tried once, for a kernel is built where it is first used."""
    try:
        from elastic3d.devices import row_kernel

        row_kernel.add_rows(torch.empty(1, device=f"cuda:{index}"), torch.ones(2, 1, device=f"cuda:{index}"), True)
    except Exception as error:  # noqa: BLE001  # whatever Triton lacks, such as a compiler: the bits are the same
        process_log().emit("device.kernel_missing", error=f"{type(error).__name__}: {error}"[:500])
        return add_rows
    return row_kernel.add_rows


@functools.cache
def _square_kernel(index: int) -> SquareRows | None:
    """Return what sums squares on this device, None where it cannot be built; tried once, as the kernel for rows is."""
    try:
        from elastic3d.devices import square_kernel

        square_kernel.square_rows([torch.ones(1, 32, device=f"cuda:{index}")], lambda rows: rows[:, 0])
    except Exception as error:  # noqa: BLE001  # as above
        process_log().emit("device.kernel_missing", error=f"{type(error).__name__}: {error}"[:500])
        return None
    return square_kernel.square_rows


class CudaStopwatch:
    """Events that note the time, on one stream. An event that nobody asks for any more is used again.

    The stream is named with each: a backward pass runs on a thread of torch's own, and FSDP's hooks in streams of its
    own, while it is the training's stream that waits for them.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unused: list[Any] = []

    def mark(self) -> Any:
        """Record an event: a microsecond or two of the host, and nothing that the device waits for."""
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def reached(self, mark: Any) -> bool:
        """Return whether the event has happened."""
        return bool(mark.query())

    def nanoseconds(self, first: Any, second: Any) -> int:
        """Return what torch gives in milliseconds; the driver notes times to half a microsecond."""
        return max(0, round(float(first.elapsed_time(second)) * 1e6))

    def forget(self, marks: Iterable[Any]) -> None:
        """Keep the events to be recorded again."""
        self._unused.extend(marks)


class CudaCopyStream:
    """One stream for life, of high priority, and two pinned buffers.

    It hashes nothing: the bytes come several times as fast as one thread hashes them.
    """

    hashes = False

    def __init__(self, device: torch.device, *, nbytes: int = PINNED) -> None:
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        halves = _Pinned(nbytes, self._stream), _Pinned(nbytes, self._stream)
        self._ring = BounceRing(*halves, Movers(movers()))

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Copy the device's tensors through the pinned buffers, and those of the host as they are."""
        given = list(moves)
        on_host = [move for move in given if move.tensor.device.type == "cpu"]
        on_device = (move for move in given if move.tensor.device.type != "cpu")
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            self._ring.copy(on_device, target, lambda: copy_from_host(on_host, target))


class _Pinned:
    """One pinned buffer. What fills it runs on one stream."""

    def __init__(self, nbytes: int, stream: Any) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._stream = stream
        self._queued: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, start: int, data: torch.Tensor) -> None:
        """Queue a copy on the current stream, which is this one's."""
        self.memory[start : start + data.numel()].copy_(data, non_blocking=True)

    def send(self, start: int, to: torch.Tensor) -> None:
        """Queue a copy on the current stream, which is this one's."""
        to.copy_(self.memory[start : start + to.numel()], non_blocking=True)

    def mark(self) -> None:
        """Record the event behind what is queued."""
        self._queued.record(self._stream)

    def wait(self) -> None:
        """Block on the event, not on the stream."""
        self._queued.synchronize()


def movers() -> int:
    """Return how many threads move snapshots between pinned and shared memory: half of a device's cores at most."""
    cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
    return max(1, min(MOVERS, cores // 2))


def device_files(properties: Any, root: Path = Path("/")) -> list[str]:
    """Return the files in /dev by which processes use a device; those of all devices where its own is not known."""
    place = (getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    domain, bus, device = place
    if domain is not None and bus is not None and device is not None:
        facts = root / f"proc/driver/nvidia/gpus/{domain:04x}:{bus:02x}:{device:02x}.0/information"
        with contextlib.suppress(OSError):
            for line in facts.read_text().splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "Device Minor" and value.strip().isdecimal():
                    return [f"/dev/nvidia{value.strip()}"]
    return ["/dev/kfd", *(f"/dev/{file.name}" for file in sorted((root / "dev").glob("nvidia[0-9]*")))]


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
