"""A device for tests on machines without one: CPU tensors, but with a device's ways of going wrong.

Work on it is done later, on a thread of its own, and what is not done yet shows as poison: a copy that does not wait
for the mark it was given writes poison into the snapshot. The current device belongs to a thread, so that a thread
which does not enter its device is refused.

A script registers it before `elastic3d.run(..., device="emulated")`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from elastic3d.devices import CopyStream, Move, register
from elastic3d.devices.cpu import CpuDevice, copy_from_host
from elastic3d.values import DeviceFacts

KIND = "emulated"
POISON = 0xFF
_current = threading.local()


class WrongThread(AssertionError):
    """A thread used a device that it has not entered."""


class EmulatedDevice(CpuDevice):
    """One slot's device. late: seconds by which its work is done after it was queued."""

    kind = KIND

    def __init__(self, index: int, *, late: float = 0.02) -> None:
        self.index, self._late = index, late
        self._work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._queued = self._done = 0
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None

    def enter_thread(self) -> None:
        """Make it the calling thread's device."""
        _current.index = self.index

    def open(self) -> None:
        """Take it into use on the calling thread."""
        self.enter_thread()

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it, or room for a copy that holds poison until the device gets there."""
        if tensor.is_contiguous():
            return tensor
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        room.reshape(-1).view(torch.uint8).fill_(POISON)
        self._queue(lambda: room.copy_(tensor))
        return room

    def mark(self) -> object:
        """Return how much work was queued so far."""
        return self._queued

    def copy_stream(self) -> CopyStream:
        """Return a stream for a thread that has entered this device."""
        return _EmulatedStream(self)

    def reach(self, mark: int) -> None:
        """Block until so much work is done, on a thread that has entered this device."""
        self.check_thread()
        with self._changed:
            self._changed.wait_for(lambda: self._done >= mark)

    def check_thread(self) -> None:
        """Refuse a thread whose current device is another: it would be device 0."""
        current = getattr(_current, "index", 0)
        if current != self.index:
            raise WrongThread(f"this thread is on device {current}, and its work is for device {self.index}")

    def facts(self, slots: int) -> DeviceFacts:
        """Return the host's facts, by this kind."""
        host = super().facts(slots)
        return DeviceFacts(kind=self.kind, name="emulated device", memory=host.memory, devices=slots, torch=host.torch)

    def _queue(self, work: Callable[[], Any]) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, daemon=True, name=f"emulated-device-{self.index}")
            self._worker.start()
        self._queued += 1
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._late)
            work()
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class _EmulatedStream:
    """Copies what is there when the mark is reached."""

    def __init__(self, device: EmulatedDevice) -> None:
        device.check_thread()
        self._device = device

    def copy(self, moves: Iterable[Move], target: memoryview, after: object) -> None:
        """Wait for the mark and copy."""
        assert isinstance(after, int)
        self._device.reach(after)
        copy_from_host(moves, target)


def install(*, late: float = 0.02) -> str:
    """Add the kind for this process and those forked from it; return its name."""
    register(KIND, lambda index: EmulatedDevice(index, late=late))
    return KIND
