"""Two buffers in turns between a device and a target in pageable memory: while one is filled, the other is emptied.

Nothing waits for a single tensor. Copies into a buffer are queued until it is full, then their end is marked; what
waits for the mark is the emptying of that buffer, before it is filled again. So there is one wait for each bufferful,
and while the host waits the device fills the other one. The way back goes alike: a buffer that the host has filled is
queued for the device, and filled again when the device has emptied it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from elastic3d.devices.device import DeviceLoad, Move
from elastic3d.devices.movers import Movers, Piece

ALONE = Movers()
"""The calling thread."""


class BounceBuffer(Protocol):
    """Memory that a device writes to in its own time, in the order in which it was asked to."""

    memory: torch.Tensor
    """Its bytes, on the host."""

    def fill(self, start: int, data: torch.Tensor) -> None:
        """Queue a copy of bytes on the device to `start` and behind."""
        ...

    def mark(self) -> None:
        """Mark the end of what was queued so far."""
        ...

    def wait(self) -> None:
        """Block until the device has got to the newest mark."""
        ...


class LoadBuffer(Protocol):
    """Memory that a device reads from in its own time, in the order in which it was asked to."""

    memory: torch.Tensor
    """Its bytes, on the host."""

    def send(self, start: int, to: torch.Tensor) -> None:
        """Queue a copy of the bytes from `start` on to bytes on the device."""
        ...

    def mark(self) -> None:
        """Mark the end of what was queued so far."""
        ...

    def wait(self) -> None:
        """Block until the device has got to the newest mark."""
        ...


def load(loads: Iterable[DeviceLoad], first: LoadBuffer, second: LoadBuffer, movers: Movers = ALONE) -> None:
    """Copy tensors of the host to a device through two fresh buffers in turns; return when all are there.

    A bufferful is filled as a whole, and then sent tensor by tensor.
    """
    filling, other, filled = first, second, 0
    waits = False  # whether the device may still read what was queued from the other one
    pieces: list[Piece] = []
    # The source is held until it has been moved: what gives it out may make it for that alone.
    sends: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def send() -> None:
        movers.move(pieces)
        for start, to, _ in sends:
            filling.send(start, to)
        filling.mark()
        pieces.clear()
        sends.clear()

    for one in loads:
        data, target = (part.detach().reshape(-1).view(torch.uint8) for part in (one.source, one.target))
        assert data.numel() == target.numel()
        done = 0
        while done < data.numel():
            if filled == filling.memory.numel():
                send()
                filling, other, filled = other, filling, 0
                if waits:
                    filling.wait()
                waits = True
            count = min(filling.memory.numel() - filled, data.numel() - done)
            pieces.append((filling.memory.data_ptr() + filled, data.data_ptr() + done, count))
            sends.append((filled, target[done : done + count], data))
            filled += count
            done += count
    send()
    if waits:
        other.wait()
    filling.wait()


class BounceRing:
    """Copies through two buffers. For one thread. movers: empty the buffers."""

    def __init__(self, first: BounceBuffer, second: BounceBuffer, movers: Movers = ALONE) -> None:
        self._halves = (_Half(first, movers), _Half(second, movers))

    def copy(self, moves: Iterable[Move], target: memoryview, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Copy the tensors' bytes to their offsets of `target`, and return when all are there.

        meanwhile: called once all is queued, while the device still works.
        """
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        filling, other = self._halves
        for half in self._halves:
            half.forget()  # what a copy that failed has left
        for move in moves:
            data = move.tensor.reshape(-1).view(torch.uint8)
            done = 0
            while done < data.numel():
                if not filling.free:
                    filling.buffer.mark()
                    filling, other = other, filling
                    filling.empty(base)
                count = min(filling.free, data.numel() - done)
                filling.add(data[done : done + count], move.offset + done)
                done += count
        filling.buffer.mark()
        meanwhile()
        other.empty(base)
        filling.empty(base)


class _Half:
    """One buffer: what was queued into it, and where in the target that belongs."""

    def __init__(self, buffer: BounceBuffer, movers: Movers) -> None:
        self.buffer, self._movers = buffer, movers
        self._filled = 0
        self._pieces: list[tuple[int, int, int]] = []  # where it is here, where it belongs, how many bytes

    @property
    def free(self) -> int:
        return self.buffer.memory.numel() - self._filled

    def add(self, data: torch.Tensor, offset: int) -> None:
        self.buffer.fill(self._filled, data)
        self._pieces.append((self._filled, offset, data.numel()))
        self._filled += data.numel()

    def empty(self, base: int) -> None:
        """Wait for what is queued and move it to where it belongs, from the address `base` on."""
        if self._pieces:
            self.buffer.wait()
        memory = self.buffer.memory.data_ptr()
        self._movers.move([(base + offset, memory + here, count) for here, offset, count in self._pieces])
        self.forget()

    def forget(self) -> None:
        self._pieces.clear()
        self._filled = 0
