"""Copies a trainer's state into shared memory at the speed of memory, during the next forward and backward pass.

One thread copies, on one stream of the trainer's device for as long as the trainer lives. What it copies are contiguous
tensors as they were at a mark in the device's queue of work: the mark is made after the last of them was, since making
one contiguous is work that is queued too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from checkpointing.format.grid import TILE_BYTES
from elastic3d import threads
from elastic3d.devices import ComputeDevice, CopyStream, Move
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.table import SnapshotTable

if TYPE_CHECKING:
    import torch

    from checkpointing.format.tiles import Box, TensorSpec

Tiles = Sequence[tuple["TensorSpec", "Box", "torch.Tensor"]]


@dataclass(slots=True)
class Copy:
    """One snapshot to copy; it holds the tensors so that they are not freed. after: the mark where they are whole."""

    table: SnapshotTable
    tensors: list[torch.Tensor]
    after: object
    acquire: Callable[[], int]
    complete: Callable[[int], None]
    done: threading.Event = field(default_factory=threading.Event)


class Copier:
    """A thread that copies one snapshot at a time into the arenas the trainer inherited."""

    def __init__(self, arenas: Sequence[Arena], device: ComputeDevice) -> None:
        self._arenas, self._device = arenas, device
        self._copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._running: Copy | None = None
        self._error: BaseException | None = None
        self._started = False
        self._last: tuple[SnapshotTable, int] | None = None

    def start(self, copy: Copy) -> None:
        """Start a copy; the previous one must be finished."""
        if not self._started:
            self._started = True
            threads.start(self._run, name="snapshot-copy")
        self._running = copy
        self._copies.put(copy)

    def finish(self, patience: float | None = None) -> None:
        """Block until nothing reads the state any more; raise what the copy raised, TimeoutError after `patience`."""
        running = self._running
        if running is not None:
            if not running.done.wait(patience):
                raise TimeoutError(f"the snapshot being copied was not there within {patience} s; it is given up")
            self._running = None
        if self._error is not None:
            raise self._error

    def byte(self, key: str, at: int) -> int | None:
        """Return byte `at` of a tensor in the last copy, None if it is not there; no copy may be running."""
        if self._last is None:
            return None
        table, buffer = self._last
        entry = next((entry for entry in table.entries if entry.spec.key == key and at < entry.nbytes), None)
        return None if entry is None else self._arenas[buffer].view(table.nbytes)[entry.offset + at]

    def _run(self) -> None:
        stream: CopyStream | None = None
        while True:
            copy = self._copies.get()
            try:
                if stream is None:
                    self._device.enter_thread()
                    stream = self._device.copy_stream()
                buffer = copy.acquire()
                _copy(copy, self._arenas[buffer], stream)
                copy.complete(buffer)
                self._last = copy.table, buffer
            except BaseException as error:  # noqa: BLE001 - raised again where the trainer waits for the copy
                self._error = error
            finally:
                copy.done.set()


def _copy(copy: Copy, arena: Arena, stream: CopyStream) -> None:
    table = copy.table
    arena.reserve(table.nbytes)
    if table.nbytes:
        entries = zip(table.entries, copy.tensors, strict=True)
        moves = [Move(tensor=tensor, offset=entry.offset) for entry, tensor in entries]
        stream.copy(moves, arena.view(table.nbytes), copy.after)


def prepare(
    tiles: Tiles,
    known: SnapshotTable | None,
    device: ComputeDevice,
    *,
    tile_bytes: int = TILE_BYTES,
    acquire: Callable[[], int],
    complete: Callable[[int], None],
) -> Copy:
    """Return the copy of these tiles, under the table `known` if it still fits. ValueError where a tensor does not.

    tile_bytes: the most of one tile that others cut it into.

    Runs on the training's thread: only bookkeeping, and a clone of the few tensors that are not contiguous.
    """
    boxes = [(spec, box) for spec, box, _ in tiles]
    if known is None or [(entry.spec, entry.box) for entry in known.entries] != boxes:
        known = tables.lay_out(boxes, tile_bytes)
    tensors = []
    for entry, (spec, box, tensor) in zip(known.entries, tiles, strict=True):
        if tuple(tensor.shape) != box.shape or str(tensor.dtype).removeprefix("torch.") != spec.dtype:
            raise ValueError(
                f"{spec.key} {box}: the tensor has shape {tuple(tensor.shape)} and {tensor.dtype},"
                f" its box has {box.shape} and {spec.dtype}"
            )
        tensor = device.contiguous(tensor.detach())
        assert tensor.nbytes == entry.nbytes
        tensors.append(tensor)
    return Copy(table=known, tensors=tensors, after=device.mark(), acquire=acquire, complete=complete)
