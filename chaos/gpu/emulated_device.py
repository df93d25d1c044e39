"""A device for tests on machines without one: CPU tensors, but with a device's ways of going wrong.

- Work on it is done later, on a thread of its own, and what is not done yet shows as poison: a copy that does not wait
  for the mark it was given writes poison into the snapshot.
- The current device belongs to a thread: one that does not enter its device is refused.
- It has room for one trainer's model, and a killed trainer's memory comes back some time after its process is gone: a
  second trainer on one device runs out of memory, and so does one that does not wait.

A script calls `install` before `elastic3d.run(..., device="emulated")`; where ELASTIC3D_DEVICE says so, `device="auto"`
will do.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic3d.devices import CopyStream, DeviceLoad, Move, register
from elastic3d.devices.cpu import CpuDevice
from elastic3d.devices.reading import Reading
from elastic3d.devices.ring import BounceRing, load
from elastic3d.values import DeviceFacts

KIND = "emulated"
FOLDER = "EMULATED_DEVICES"
"""Environment variable: the folder in which processes account for what they hold of this machine's devices."""

CAPACITY, HELD = 150 << 20, 100 << 20
"""Bytes of a device, and those that any model takes."""

CONTEXT = 10 << 20
"""Bytes that any process takes that has the device open."""

BUFFER = 1 << 20
"""Bytes of each of a stream's two buffers."""

POISON = 0xFF
_current = threading.local()


class WrongThread(AssertionError):
    """A thread used a device that it has not entered."""


class EmulatedDevice(CpuDevice):
    """One slot's device. late: seconds by which its work is done after it was queued. waits: how often it was read."""

    kind = KIND
    exclusive = True
    standby_bytes = CONTEXT

    def __init__(self, index: int, *, late: float = 0.02, freed_after: float = 0.3) -> None:
        self.index, self._late = index, late
        self._memory = _Memory(index, freed_after) if os.environ.get(FOLDER) else None
        self._opened = self._taken = False
        self.waits = 0
        self.loaded = False
        self.connected: list[dist.ProcessGroup] = []
        self.broken = ""
        self._work: queue.SimpleQueue[tuple[float, Callable[[], Any]]] = queue.SimpleQueue()
        self._queued = self._done = 0
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def enter_thread(self) -> None:
        """Make it the calling thread's device."""
        _current.index = self.index

    def open(self) -> None:
        """Take it into use on the calling thread."""
        self.enter_thread()
        if self._memory is not None and not self._opened:
            self._memory.hold(CONTEXT)
        self._opened = True

    def installed(self) -> int:
        """Return that each slot has one."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def described(self) -> str:
        """Return what they all are."""
        return "emulated device"

    def place(self, module: nn.Module) -> None:
        """Take memory for a model, whatever its size, with its first module."""
        if self._memory is not None and not self._taken:
            self._memory.hold(CONTEXT + HELD)
            self._taken = True

    def free(self) -> int:
        """Return what no other process holds, or has held until a moment ago."""
        return self._memory.free() if self._memory is not None else CAPACITY

    def release(self) -> None:
        """Wait for what is queued."""
        self.await_mark(self._queued)

    def memory_use(self) -> str:
        """Return which processes hold how much of it."""
        return self._memory.use() if self._memory is not None else ""

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or room for a copy that holds poison until the device gets there."""
        if tensor.is_contiguous():
            return tensor
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        room.reshape(-1).view(torch.uint8).fill_(POISON)
        self._queue(lambda: room.copy_(tensor))
        return room

    def begin_reading(self, tensors: Sequence[torch.Tensor]) -> Reading:
        """Queue a copy, into room that holds poison until the device gets there."""
        return Reading(tensors, lambda tensor: False, self._begin_copy)

    def _begin_copy(self, vector: torch.Tensor) -> Callable[[], torch.Tensor]:
        room = torch.empty_like(vector)
        room.view(torch.uint8).fill_(POISON)
        self._queue(lambda: room.copy_(vector))
        mark = self._queued

        def wait() -> torch.Tensor:
            self.waits += 1
            self.await_mark(mark)
            return room

        return wait

    def mark(self) -> object:
        """Return how much work was queued so far."""
        return self._queued

    def stopwatch(self) -> EmulatedStopwatch:
        """Return one of this device's work."""
        return EmulatedStopwatch(self)

    def compute(self, seconds: float) -> None:
        """Queue work that takes so long, as a kernel does: the call returns at once."""
        self._queue(lambda: time.sleep(seconds), late=0.0)

    def note(self, work: Callable[[], Any]) -> None:
        """Queue what takes no time on the device."""
        self._queue(work, late=0.0)

    def copy_stream(self) -> CopyStream:
        """Return a stream for a thread that has entered this device."""
        return EmulatedStream(self)

    def await_mark(self, mark: int) -> None:
        """Block until so much work is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= mark)

    def check_thread(self) -> None:
        """Refuse a thread whose current device is another: it would be device 0."""
        current = getattr(_current, "index", 0)
        if current != self.index:
            raise WrongThread(f"this thread is on device {current}, and its work is for device {self.index}")

    def load(self, loads: Iterable[DeviceLoad]) -> None:
        """Copy through two buffers of a stream of its own."""
        self.loaded = True
        load(loads, *EmulatedStream(self).buffers)

    def connect(self, group: dist.ProcessGroup) -> None:
        """Remember that it was asked for."""
        self.connected.append(group)

    def group_error(self, group: dist.ProcessGroup) -> str:
        """Return what `broken` says."""
        return self.broken

    def facts(self, slots: int) -> DeviceFacts:
        """Return the host's facts, by this kind."""
        host = super().facts(slots)
        return DeviceFacts(kind=self.kind, name="emulated device", memory=CAPACITY, devices=slots, torch=host.torch)

    def _queue(self, work: Callable[[], Any], *, late: float | None = None) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, daemon=True, name=f"emulated-device-{self.index}")
            self._worker.start()
        self._queued += 1
        self._work.put((self._late if late is None else late, work))

    def _run(self) -> None:
        while True:
            late, work = self._work.get()
            if late:
                time.sleep(late)
            work()
            with self._changed:
                self._done += 1
                self._changed.notify_all()


@dataclass(slots=True)
class EmulatedMark:
    """A point in a device's work. at: nanoseconds of the monotonic clock when it got there, 0 before."""

    at: int = 0


class EmulatedStopwatch:
    """Notes when the device gets to its marks. read: how many times were asked for."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self.read = 0

    def mark(self) -> EmulatedMark:
        """Queue it behind the work so far."""
        mark = EmulatedMark()

        def note() -> None:
            mark.at = time.monotonic_ns()

        self._device.note(note)
        return mark

    def reached(self, mark: EmulatedMark) -> bool:
        """Return whether the device has got there."""
        return mark.at > 0

    def nanoseconds(self, first: EmulatedMark, second: EmulatedMark) -> int:
        """Return the time between two, which the device has reached."""
        assert first.at, "read before the device was there"
        assert second.at, "read before the device was there"
        self.read += 1
        return second.at - first.at

    def forget(self, marks: Iterable[EmulatedMark]) -> None:
        """Make them useless: on a real device they would be used again."""
        for mark in marks:
            mark.at = 0


class _Memory:
    """What processes hold of one device: a file each, named by its process, which counts for a while after its end."""

    def __init__(self, index: int, freed_after: float) -> None:
        node = os.environ.get("ELASTIC3D_NODE_TOKEN", "node")
        self._folder = Path(os.environ[FOLDER], f"{node}-{index}")
        self._freed_after = freed_after

    def free(self) -> int:
        return CAPACITY - sum(self._held())

    def use(self) -> str:
        held = [f"pid {file.name} {file.read_text()}" for file in sorted(self._folder.glob("*[0-9]"))]
        return f"the emulated device has {CAPACITY} bytes: {', '.join(held) or 'all free'}"

    def hold(self, nbytes: int) -> None:
        """Hold so many bytes in all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        free = self.free()
        if nbytes > free:
            raise torch.OutOfMemoryError(f"emulated device out of memory: {nbytes} bytes wanted, {free} free")
        Path(self._folder, str(os.getpid())).write_text(str(nbytes))

    def _held(self) -> Iterator[int]:
        """Yield the bytes that each other process holds: until it is dead, and some time more."""
        for file in self._folder.glob("*[0-9]"):
            if file.name == str(os.getpid()):
                continue
            ended = file.with_suffix(".ended")
            if not _lives(file.name) and not ended.exists():
                ended.touch()
            if not ended.exists() or time.time() - ended.stat().st_mtime < self._freed_after:
                yield int(file.read_text() or 0)


def _lives(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class EmulatedStream:
    """Copies through two buffers, on a thread of its own and in its own time, like a device's copy engine.

    late: seconds before each bufferful. Work on the device and work on the stream do not wait for each other, except
    where the stream is told to.
    """

    hashes = False

    def __init__(self, device: EmulatedDevice, *, nbytes: int = BUFFER, late: float = 0.0) -> None:
        device.check_thread()
        self._device, self._late = device, late
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.buffers = (EmulatedBuffer(self, nbytes), EmulatedBuffer(self, nbytes))
        self._ring = BounceRing(*self.buffers)
        threading.Thread(target=self._run, daemon=True, name=f"emulated-stream-{device.index}").start()

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Have the stream wait for the mark, then copy."""
        assert isinstance(after, int)
        self._device.check_thread()
        self.queue(lambda: self._device.await_mark(after))
        self._ring.copy(moves, target)

    def queue(self, work: Callable[[], Any]) -> None:
        """Do some work after what was queued before."""
        self._work.put(work)

    def mark(self) -> threading.Event:
        """Return what is set when all that was queued is done."""
        reached = threading.Event()
        self.queue(reached.set)
        return reached

    def _run(self) -> None:
        fresh = True
        while True:
            work = self._work.get()
            if fresh:
                time.sleep(self._late)
            work()
            fresh = isinstance(getattr(work, "__self__", None), threading.Event)


class EmulatedBuffer:
    """One buffer of a stream. It holds poison until something is copied into it."""

    def __init__(self, stream: EmulatedStream, nbytes: int) -> None:
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.waits = 0
        self._stream = stream
        self._marked = threading.Event()

    def fill(self, start: int, data: torch.Tensor) -> None:
        """Copy later."""
        to, count = self.memory.data_ptr() + start, data.numel()
        self._stream.queue(lambda: ctypes.memmove(to, data.data_ptr(), count))

    def send(self, start: int, to: torch.Tensor) -> None:
        """Copy later."""
        source, count = self.memory.data_ptr() + start, to.numel()
        self._stream.queue(lambda: ctypes.memmove(to.data_ptr(), source, count))

    def mark(self) -> None:
        """Mark the end of what was queued."""
        self._marked = self._stream.mark()

    def wait(self) -> None:
        """Block until the stream has got to the mark."""
        self.waits += 1
        self._marked.wait()


def install(*, late: float = 0.02) -> str:
    """Add the kind for this process and those forked from it; return its name."""
    register(KIND, lambda index: EmulatedDevice(index, late=late))
    return KIND
