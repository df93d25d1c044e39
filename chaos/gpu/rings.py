"""Ways to move a state between the device and shared memory, beside the one that trainers use."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elastic3d.devices import Move

BUFFER = 64 << 20


def pieces(moves: Sequence[Move], nbytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield the bytes of all tensors in pieces of at most `nbytes`, each with its offset."""
    for move in moves:
        data = move.tensor.reshape(-1).view(torch.uint8)
        for at in range(0, data.numel(), nbytes):
            yield data[at : at + nbytes], move.offset + at


def tensor_over(view: memoryview) -> torch.Tensor:
    """Return a tensor over shared memory."""
    return torch.frombuffer(view, dtype=torch.uint8)


def copy_pageable(moves: Sequence[Move], target: torch.Tensor) -> None:
    """Copy each tensor into plain memory: the driver blocks for every one."""
    for move in moves:
        data = move.tensor.reshape(-1).view(torch.uint8)
        target[move.offset : move.offset + data.numel()].copy_(data)


def copy_queued(moves: Sequence[Move], target: torch.Tensor) -> None:
    """Queue all copies into memory that is pinned."""
    for move in moves:
        data = move.tensor.reshape(-1).view(torch.uint8)
        target[move.offset : move.offset + data.numel()].copy_(data, non_blocking=True)


def copy_back(moves: Sequence[Move], source: torch.Tensor, *, queued: bool) -> None:
    """Copy from memory to the device. queued: the memory is pinned."""
    for move in moves:
        data = move.tensor.reshape(-1).view(torch.uint8)
        data.copy_(source[move.offset : move.offset + data.numel()], non_blocking=queued)


class Ring:
    """Pinned buffers that one stream fills and several threads empty, or the other way round."""

    def __init__(self, device: torch.device, *, threads: int, nbytes: int = BUFFER) -> None:
        self._cuda = device.type == "cuda"
        self._threads = threads
        self._nbytes = nbytes
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2 * threads)]
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._device = device

    def to_host(self, moves: Sequence[Move], target: memoryview) -> None:
        """Copy each tensor into shared memory; return when all is there."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        free: queue.SimpleQueue[int] = queue.SimpleQueue()
        full: queue.SimpleQueue[tuple[int, int, int, Any] | None] = queue.SimpleQueue()
        for number in range(len(self._buffers)):
            free.put(number)

        def empty() -> None:
            while (filled := full.get()) is not None:
                number, offset, count, event = filled
                if event is not None:
                    event.synchronize()
                ctypes.memmove(base + offset, self._buffers[number].data_ptr(), count)
                free.put(number)

        workers = self._started(empty)
        for data, offset in pieces(moves, self._nbytes):
            number = free.get()
            full.put((number, offset, data.numel(), self._queue(self._buffers[number][: data.numel()], data)))
        for _ in workers:
            full.put(None)
        for worker in workers:
            worker.join()

    def to_device(self, moves: Sequence[Move], source: memoryview) -> None:
        """Copy from shared memory into each tensor; return when all is queued and the buffers are read."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(source))
        free: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        wanted: queue.SimpleQueue[tuple[torch.Tensor, int] | None] = queue.SimpleQueue()
        for number in range(len(self._buffers)):
            free.put((number, None))

        def fill() -> None:
            if self._cuda:
                torch.cuda.set_device(self._device)
            while (piece := wanted.get()) is not None:
                data, offset = piece
                number, event = free.get()
                if event is not None:
                    event.synchronize()
                ctypes.memmove(self._buffers[number].data_ptr(), base + offset, data.numel())
                free.put((number, self._queue(data, self._buffers[number][: data.numel()])))

        workers = self._started(fill)
        for piece in pieces(moves, self._nbytes):
            wanted.put(piece)
        for _ in workers:
            wanted.put(None)
        for worker in workers:
            worker.join()
        if self._stream is not None:
            self._stream.synchronize()

    def _started(self, work: Any) -> list[threading.Thread]:
        workers = [threading.Thread(target=work, daemon=True) for _ in range(self._threads)]
        for worker in workers:
            worker.start()
        return workers

    def _queue(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Queue one copy; return an event at its end, None where it is done already."""
        if self._stream is None:
            target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event
