"""Copies a trainer's state into shared memory at the speed of memory, during the next forward and backward pass.

One thread copies, on one stream of the trainer's device for as long as the trainer lives. What it copies are contiguous
tensors as they were at a mark in the device's queue of work: the mark is made after the last of them was, since making
one contiguous is work that is queued too.

What lies on the host is hashed as it is written, tile by tile, so that a bit that changes in the shared memory from
then on shows. With that the copy makes a third of memory's speed: so once the training waits for it, the rest is copied
alone, except for the first `SURE` bytes. Of that, and of what lies on a device, whose bytes come faster than a thread
hashes them, the keeper takes the digests of what it finds moments later: what has changed by then does not show.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from checkpointing.format.grid import TILE_BYTES
from checkpointing.format.tiles import begin_digest
from elastic3d import threads
from elastic3d.devices import ComputeDevice, CopyStream, Move
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.table import SnapshotTable

if TYPE_CHECKING:
    import torch
    from blake3 import blake3

    from checkpointing.format.tiles import Box, TensorSpec

SURE = 8 << 20
"""Bytes of a snapshot on the host that are hashed whoever waits: some milliseconds."""

Tiles = Sequence[tuple["TensorSpec", "Box", "torch.Tensor"]]


@dataclass(slots=True)
class Copy:
    """One snapshot to copy; it holds the tensors so that they are not freed. after: the mark where they are whole.

    complete: called with the buffer, and with each tile's digest, "" for those that were not hashed. hurried: somebody
    waits for it.
    """

    table: SnapshotTable
    tensors: list[torch.Tensor]
    after: object
    acquire: Callable[[], int]
    complete: Callable[[int, Sequence[str]], None]
    hurried: threading.Event = field(default_factory=threading.Event)
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

    def finish(self, patience: float | None = None, *, hurry: bool = True) -> None:
        """Block until nothing reads the state any more; raise what the copy raised, TimeoutError after `patience`.

        hurry: what is not hashed yet is copied alone.
        """
        running = self._running
        if running is not None:
            if hurry:
                running.hurried.set()
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
                copy.complete(buffer, _copy(copy, self._arenas[buffer], stream))
                self._last = copy.table, buffer
            except BaseException as error:  # noqa: BLE001 - raised again where the trainer waits for the copy
                self._error = error
            finally:
                copy.done.set()


def _copy(copy: Copy, arena: Arena, stream: CopyStream) -> Sequence[str]:
    """Copy a snapshot; return the digest of each tile, "" for what was not hashed, none where nothing was."""
    table = copy.table
    arena.reserve(table.nbytes)
    if not table.nbytes:
        return ()
    view = arena.view(table.nbytes)
    if not stream.hashes:
        entries = zip(table.entries, copy.tensors, strict=True)
        stream.copy([Move(tensor=tensor, offset=entry.offset) for entry, tensor in entries], view, copy.after)
        return ()
    hashers: list[blake3 | None] = []
    stream.copy(_hashed(copy, hashers), view, copy.after)
    return ["" if hasher is None else hasher.hexdigest() for hasher in hashers]


def _hashed(copy: Copy, hashers: list[blake3 | None]) -> Iterator[Move]:
    """Yield each tile's move when the one before is made, and note what hashes it."""
    tiles = iter(copy.table.tiles)
    for entry, count, tensor in zip(copy.table.entries, copy.table.counts, copy.tensors, strict=True):
        for tile in itertools.islice(tiles, count):
            hurried = copy.hurried.is_set() and tile.offset + tile.nbytes > SURE
            hashers.append(None if hurried else begin_digest(tile.spec, tile.box))
            yield Move(
                tensor=tensor,
                offset=tile.offset,
                start=tile.offset - entry.offset,
                nbytes=tile.nbytes,
                hasher=hashers[-1],
            )


def prepare(
    tiles: Tiles,
    known: SnapshotTable | None,
    device: ComputeDevice,
    *,
    tile_bytes: int = TILE_BYTES,
    acquire: Callable[[], int],
    complete: Callable[[int, Sequence[str]], None],
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
