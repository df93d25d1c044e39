"""Snapshots outlive the trainers, and the nodes, that made them."""

from __future__ import annotations

import os
import signal
import struct
import time

import numpy as np
import pytest

from checkpointing.format.tiles import digest
from elastic3d.errors import StateError
from elastic3d.port import Go
from elastic3d.snapshots.client import Inventory, PeerSource, inventories
from elastic3d.worker.processes.events import (
    ExitKind,
    Restored,
    SlotLost,
    SnapshotHeld,
    SnapshotTaken,
    Started,
    StepFinished,
    TrainerExited,
)
from elastic3d.worker.processes.slot import PinnedSnapshot
from tests.worker.keepers import READER, Keeper, Nursery, assignment, eventually
from tests.worker.nursery import COLUMNS, ROWS, value

GO = Go(servers=())


def start(keeper: Keeper, *, generation: int = 1, rank: int = 0) -> int:
    """Start a trainer; return its number."""
    trainer = keeper.slot.prepare(assignment(generation=generation, rank=rank))
    keeper.slot.go(trainer, GO)
    keeper.wait(Restored)
    return trainer


def expected(step: int, key: str) -> bytes:
    """Return a tensor of the stepping trainer after a step, as bytes."""
    if key == "optimizer/w/step":
        return struct.pack("<f", step)
    if key == "model/b":
        return struct.pack("<f", step % 128)[2:] * 7
    rows = np.array([value(step, key, row) for row in range(ROWS)], dtype=np.float32)
    return np.repeat(rows, COLUMNS).tobytes()


def check(inventory: Inventory) -> None:
    """Fetch every tile of a snapshot and compare it with the trainer's state."""
    source = PeerSource(inventory.server, READER)
    offers = inventory.tiles()
    source.prefetch(offers)
    tensors: dict[str, bytes] = {}
    for offer in offers:
        data = source.fetch(offer)
        assert digest(offer.spec, offer.box, data) == offer.digest
        tensors[offer.spec.key] = tensors.get(offer.spec.key, b"") + bytes(data)
    source.close()
    assert inventory.facts == {"step": inventory.step}
    assert tensors == {key: expected(inventory.step, key) for key in tensors}
    assert len(tensors) == 4


def check_pinned(pinned: PinnedSnapshot) -> None:
    """Compare a pinned snapshot's tiles, in order, with the trainer's state."""
    read_back: dict[str, bytes] = {}
    for piece in pinned.pieces:
        assert digest(piece.spec, piece.box, piece.data) == piece.digest
        read_back[piece.spec.key] = read_back.get(piece.spec.key, b"") + bytes(piece.data)
    assert read_back == {key: expected(pinned.step, key) for key in read_back}
    assert len(read_back) == 4


def test_snapshots_survive_the_trainer(nursery: Nursery) -> None:
    """After kill -9 another process fetches the newest snapshots, and every byte is that step's."""
    keeper = nursery.keeper("steps")
    start(keeper)
    keeper.wait(SnapshotHeld, where=lambda event: event.step >= 10)
    os.kill(next(e.pid for e in keeper.seen if isinstance(e, Started)), signal.SIGKILL)
    ended = keeper.wait(TrainerExited)
    listed = inventories([keeper.server], READER)
    # The newest is at most the one whose copy had not finished, and one not taken while two waited, behind.
    assert max(one.step for one in listed) >= ended.step - 2
    for one in listed:
        check(one)


def test_snapshots_survive_the_node(nursery: Nursery) -> None:
    """After kill -9 of the keeper its buddy has the newest held snapshot, and every byte is that step's."""
    home, buddy = nursery.keeper("steps"), nursery.keeper("steps")
    buddy.slot.sealed(1, [home.id])
    home.slot.set_buddy(buddy.server)
    start(home)
    held = home.wait(SnapshotHeld, where=lambda event: event.step >= 10 and event.buddy == buddy.server).step
    os.kill(home.pid, signal.SIGKILL)
    home.wait(SlotLost)
    listed = inventories([home.server, buddy.server], READER)
    assert max(one.step for one in listed) >= held
    for one in listed:
        assert one.server == buddy.server
        check(one)


def test_a_planned_leave_loses_no_step(nursery: Nursery) -> None:
    """The step a trainer leaves at is complete in memory, even if two older ones are still pending."""
    keeper = nursery.keeper("steps")
    keeper.slot.set_buddy("127.0.0.1:9")  # nobody: nothing ever becomes safe
    trainer = start(keeper)
    keeper.wait(StepFinished, where=lambda event: event.record.step >= 8)
    keeper.slot.ask_leave(trainer)
    ended = keeper.wait(TrainerExited)
    assert ended.kind is ExitKind.LEFT
    newest = max(inventories([keeper.server], READER), key=lambda one: one.step)
    assert newest.step == ended.step
    check(newest)


def test_the_next_generation_reuses_the_same_memory(nursery: Nursery) -> None:
    """Trainer after trainer, killed at any moment: each gets its buffers, and snapshots are still held."""
    keeper = nursery.keeper("steps")
    for generation in range(1, 6):
        trainer = start(keeper, generation=generation)
        keeper.wait(SnapshotHeld, where=lambda event, g=generation: event.generation == g and event.step >= 3)
        # Its predecessor's snapshots stay until all its ranks know that a step of its own is safe.
        deadline = time.monotonic() + 30
        while {one.generation for one in inventories([keeper.server], READER)} != {generation}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        keeper.slot.stop(trainer)
        assert keeper.wait(TrainerExited).kind is ExitKind.STOPPED
        listed = inventories([keeper.server], READER)
        assert {one.generation for one in listed} == {generation}
        check(max(listed, key=lambda one: one.step))


def test_an_upload_reads_one_step_while_training_goes_on(nursery: Nursery) -> None:
    """A snapshot for a checkpoint waits for its upload, stays unchanged during it, and is released after it."""
    keeper = nursery.keeper("steps")
    start(keeper)
    taken = keeper.wait(SnapshotTaken, where=lambda event: event.checkpoint)
    assert taken.step >= 5
    keeper.wait(StepFinished, where=lambda event: event.record.step > taken.step + 10)
    with keeper.slot.pieces(taken.step) as pinned:
        check_pinned(pinned)
        before = keeper.wait(StepFinished).record.step
        keeper.wait(SnapshotHeld, where=lambda event: event.step > before + 10)
        check_pinned(pinned)
    with pytest.raises(StateError, match="no longer in memory"):
        with eventually_gone(keeper, taken.step):
            pass


def eventually_gone(keeper: Keeper, step: int):  # type: ignore[no-untyped-def]
    """Return the context of a step's pieces once its snapshot must have been released."""
    assert eventually(lambda: step not in {one.step for one in inventories([keeper.server], READER)})
    return keeper.slot.pieces(step)


def test_an_upload_survives_the_trainer(nursery: Nursery) -> None:
    """Snapshots of dead trainers can still be written, and then committed by the next leader."""
    keeper = nursery.keeper("steps")
    trainer = start(keeper)
    taken = keeper.wait(SnapshotTaken, where=lambda event: event.checkpoint)
    with keeper.slot.pieces(taken.step) as pinned:
        keeper.slot.stop(trainer)
        keeper.wait(TrainerExited)
        start(keeper, generation=2)
        keeper.wait(SnapshotHeld, where=lambda event: event.generation == 2 and event.step > 10)
        check_pinned(pinned)
