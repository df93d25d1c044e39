"""Copies a trainer's state into shared memory at the speed of memory, during the next forward and backward pass.

A snapshot is a list of addresses: each tensor's bytes are moved by one memmove, which leaves the interpreter free for
training. For CPU tensors no tensor operation runs on the copying thread: it would start a second pool of workers there,
and equal bits depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from elastic3d import threads
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.table import SnapshotTable

if TYPE_CHECKING:
    from checkpointing.format.tiles import Box, TensorSpec

Tiles = Sequence[tuple["TensorSpec", "Box", torch.Tensor]]


@dataclass(slots=True)
class Copy:
    """One snapshot to copy. It holds the tensors so that their memory is not freed."""

    table: SnapshotTable
    tensors: list[torch.Tensor]
    ready: torch.cuda.Event | None
    acquire: Callable[[], int]
    complete: Callable[[int], None]
    done: threading.Event = field(default_factory=threading.Event)


class Copier:
    """A thread that copies one snapshot at a time into the arenas the trainer inherited."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._running: Copy | None = None
        self._error: BaseException | None = None
        self._started = False

    def start(self, copy: Copy) -> None:
        """Start a copy; the previous one must be finished."""
        if not self._started:
            self._started = True
            threads.start(self._run, name="snapshot-copy")
        self._running = copy
        self._copies.put(copy)

    def finish(self) -> None:
        """Block until nothing reads the state any more; raise what the copy raised."""
        if self._running is not None:
            self._running.done.wait()
            self._running = None
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            copy = self._copies.get()
            try:
                buffer = copy.acquire()
                self._copy(copy, self._arenas[buffer])
                copy.complete(buffer)
            except BaseException as error:  # noqa: BLE001 - raised again where the trainer waits for the copy
                self._error = error
            finally:
                copy.done.set()

    def _copy(self, copy: Copy, arena: Arena) -> None:
        table = copy.table
        arena.reserve(table.nbytes)
        if not table.nbytes:
            return
        target = arena.view(table.nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        if copy.ready is not None:
            _from_device(copy, target)
            return
        for entry, tensor in zip(table.entries, copy.tensors, strict=True):
            ctypes.memmove(base + entry.offset, tensor.data_ptr(), entry.nbytes)


def _from_device(copy: Copy, target: memoryview) -> None:
    """Copy from a device on a separate stream, after the work queued when the snapshot was requested."""
    assert copy.ready is not None
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        stream.wait_event(copy.ready)
        for entry, tensor in zip(copy.table.entries, copy.tensors, strict=True):
            if entry.nbytes:
                bytes_ = torch.frombuffer(target, dtype=torch.uint8, offset=entry.offset, count=entry.nbytes)
                bytes_.copy_(tensor.reshape(-1).view(torch.uint8))
    stream.synchronize()


def prepare(
    tiles: Tiles, known: SnapshotTable | None, *, acquire: Callable[[], int], complete: Callable[[int], None]
) -> Copy:
    """Return the copy of these tiles, under the table `known` if it still fits. ValueError where a tensor does not.

    Runs on the training's thread: only bookkeeping, and a clone of the few tensors that are not contiguous.
    """
    boxes = [(spec, box) for spec, box, _ in tiles]
    if known is None or [(entry.spec, entry.box) for entry in known.entries] != boxes:
        known = tables.lay_out(boxes)
    tensors = []
    ready: torch.cuda.Event | None = None
    for entry, (spec, box, tensor) in zip(known.entries, tiles, strict=True):
        if tuple(tensor.shape) != box.shape or str(tensor.dtype).removeprefix("torch.") != spec.dtype:
            raise ValueError(
                f"{spec.key} {box}: the tensor has shape {tuple(tensor.shape)} and {tensor.dtype},"
                f" its box has {box.shape} and {spec.dtype}"
            )
        tensor = tensor.detach().contiguous()
        assert tensor.nbytes == entry.nbytes
        tensors.append(tensor)
        if tensor.is_cuda and ready is None:
            ready = torch.cuda.current_stream().record_event()
    return Copy(table=known, tensors=tensors, ready=ready, acquire=acquire, complete=complete)
