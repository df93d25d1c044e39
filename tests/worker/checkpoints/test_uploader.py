"""Which snapshots are written to the store, and which are skipped."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from checkpointing import open_store
from checkpointing.format.tiles import Box, Piece, TensorSpec
from elastic3d.errors import StateError
from elastic3d.membership.records import SavedStep
from elastic3d.values import Cause, Generation, Node
from elastic3d.values import Slot as Place
from elastic3d.worker.checkpoints.uploader import LONGEST_REST, TilesUploaded, Uploader, WriteFailed, rest_after
from elastic3d.worker.checkpoints.writing import CheckpointWriter
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import PinnedSnapshot, SlotPort


class Shelf:
    """A slot that holds the snapshots of some steps, and lets a write begin on request."""

    index = 0

    def __init__(self, *steps: int) -> None:
        self.steps, self.unpinned = steps, list[int]()
        self.made_in = 1
        self.gate: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def unpin(self, step: int) -> None:
        self.unpinned.append(step)

    def set_ready(self, ready: bool) -> None:
        self.ready.put(ready)

    @contextmanager
    def pieces(self, step: int) -> Iterator[PinnedSnapshot]:
        self.gate.get(timeout=10)
        if step not in self.steps:
            raise StateError("it is not there")
        spec, box = TensorSpec(key="model/w", dtype="float32", shape=(4,)), Box(start=(0,), stop=(4,))
        data = memoryview(torch.full((4,), float(step)).numpy().tobytes())
        piece = Piece(spec=spec, box=box, data=data)
        yield PinnedSnapshot(generation=self.made_in, step=step, rank=0, world=1, facts={}, pieces=[piece])


Told = queue.SimpleQueue[TilesUploaded | WriteFailed]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(5, 6, 7)


@pytest.fixture
def inbox() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def writer(tmp_path: Path) -> CheckpointWriter:
    return CheckpointWriter(open_store(tmp_path.as_uri()), Saving(), 1)


@pytest.fixture
def uploader(shelf: Shelf, inbox: Told, writer: CheckpointWriter) -> Iterator[Uploader]:
    uploader = Uploader(cast(SlotPort, shelf), writer.write, inbox.put)
    yield uploader
    shelf.gate.put(None)
    uploader.close(10.0)


def generation(number: int) -> Generation:
    node = Node(name="node0", incarnation="1", address="host", slots=(Place(tile_port=1),))
    return Generation(number=number, cause=Cause.START, nodes=(node,))


def steps(inbox: Told, count: int) -> list[Any]:
    return [(type(one), one.saved.step if isinstance(one, TilesUploaded) else one.step) for one in _take(inbox, count)]


def _take(inbox: Told, count: int) -> list[TilesUploaded | WriteFailed]:
    return [inbox.get(timeout=10) for _ in range(count)]


def test_a_checkpoint_due_during_a_write_is_skipped(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """A slow store delays the next checkpoint and nothing else."""
    uploader.offer(5, generation(1))
    uploader.offer(6, generation(1))
    assert shelf.unpinned == [6]
    shelf.gate.put(None)
    assert steps(inbox, 1) == [(TilesUploaded, 5)]


def test_the_last_snapshot_waits_for_the_write_before_it(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """It is not skipped: there will be no other."""
    uploader.offer(5, generation(1))
    uploader.flush(7, generation(1))
    shelf.gate.put(None)
    shelf.gate.put(None)
    assert steps(inbox, 2) == [(TilesUploaded, 5), (TilesUploaded, 7)]


def test_an_uploader_is_not_ready_while_the_last_snapshot_is_written(
    shelf: Shelf, inbox: Told, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for just as the uploader looked whether more is to be written."""
    asked: list[threading.Thread] = []

    class Jobs(queue.SimpleQueue[Any]):
        """Another thread asks for a write once its emptiness was looked at."""

        def empty(self) -> bool:
            nothing = super().empty()
            if not asked:
                asked.append(threading.Thread(target=raced.flush, args=(7, generation(1))))
                asked[0].start()
                asked[0].join(0.2)
            return nothing

    with monkeypatch.context() as patched:
        patched.setattr(queue, "SimpleQueue", Jobs)
        raced = Uploader(cast(SlotPort, shelf), writer.write, inbox.put)
    try:
        raced.offer(5, generation(1))
        shelf.gate.put(None)
        assert steps(inbox, 1) == [(TilesUploaded, 5)]
        asked[0].join(10)
        assert not raced.ready
        shelf.gate.put(None)
        assert steps(inbox, 1) == [(TilesUploaded, 7)]
        assert raced.ready
    finally:
        raced.close(10.0)


def test_the_last_snapshot_is_written_once(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """Whether or not its step was due for a checkpoint, and whichever message arrives first."""
    uploader.offer(5, generation(1))
    uploader.flush(5, generation(1))
    shelf.gate.put(None)
    assert steps(inbox, 1) == [(TilesUploaded, 5)]
    uploader.flush(7, generation(1))
    uploader.offer(7, generation(1))
    shelf.gate.put(None)
    assert steps(inbox, 1) == [(TilesUploaded, 7)]
    assert inbox.empty()


def test_a_repeated_step_is_another_checkpoint(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """After a loss the same step comes again, in another generation and perhaps cut differently."""
    for number in (1, 2):
        shelf.made_in = number
        uploader.offer(5, generation(number))
        shelf.gate.put(None)
        (written,) = _take(inbox, 1)
        assert isinstance(written, TilesUploaded)
        assert (written.saved.step, written.saved.made_in) == (5, number)


def test_a_step_made_again_is_not_written_as_that_of_the_generation_before(
    uploader: Uploader, shelf: Shelf, inbox: Told
) -> None:
    """A write that had to wait finds the newer snapshot, of which this rank may hold another part."""
    uploader.flush(5, generation(1))
    shelf.made_in = 2
    shelf.gate.put(None)
    (failed,) = _take(inbox, 1)
    assert isinstance(failed, WriteFailed)
    assert "was made again in generation 2" in failed.error


def test_a_missing_snapshot_is_a_failed_write(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """It is reported, and the next write starts afresh."""
    uploader.flush(9, generation(1))
    shelf.gate.put(None)
    assert steps(inbox, 1) == [(WriteFailed, 9)]


def test_an_uploader_is_ready_before_it_reports_a_write(uploader: Uploader, shelf: Shelf, inbox: Told) -> None:
    """So whoever receives the report may offer the next."""
    uploader.offer(5, generation(1))
    assert not uploader.ready
    shelf.gate.put(None)
    inbox.get(timeout=10)
    assert uploader.ready
    assert shelf.ready.get(timeout=1)


def test_the_next_checkpoint_waits_for_the_previous_commit(shelf: Shelf, inbox: Told, writer: CheckpointWriter) -> None:
    """If it learns of it; another commit, or none within the patience, does not hold it back for ever."""
    uploader = Uploader(cast(SlotPort, shelf), writer.write, inbox.put, patience=lambda: 60.0)
    try:
        uploader.offer(5, generation(1))
        shelf.gate.put(None)
        (written,) = _take(inbox, 1)
        assert isinstance(written, TilesUploaded)
        assert not uploader.ready
        uploader.settled(SavedStep(step=4, made_in=1, attempt=0, world=1))
        assert not uploader.ready
        uploader.settled(written.saved)
        assert shelf.ready.get(timeout=10)
        assert uploader.ready
    finally:
        uploader.close(10.0)


def test_pauses_after_failures_grow(shelf: Shelf, inbox: Told, writer: CheckpointWriter) -> None:
    """A missing store is not flooded with requests, and its return is noticed within a minute."""
    assert [rest_after(count) for count in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert rest_after(100) == LONGEST_REST
    rests: list[int] = []

    def rest(failures: int) -> float:
        rests.append(failures)
        return 0.01

    uploader = Uploader(cast(SlotPort, shelf), writer.write, inbox.put, rest=rest)
    try:
        for step in (8, 9, 5, 8):
            uploader.offer(step, generation(1))
            shelf.gate.put(None)
            assert shelf.ready.get(timeout=10)
        assert [kind for kind, _ in steps(inbox, 4)] == [WriteFailed, WriteFailed, TilesUploaded, WriteFailed]
        assert rests == [1, 2, 1]
    finally:
        uploader.close(10.0)


def test_unchanged_tiles_are_not_written_again(
    uploader: Uploader, shelf: Shelf, inbox: Told, writer: CheckpointWriter, tmp_path: Path
) -> None:
    """The newest committed checkpoint is the parent of every write."""
    from checkpointing import commit

    first = PinnedSnapshot(generation=1, step=5, rank=0, world=1, facts={}, pieces=_piece(1.0))
    again = PinnedSnapshot(generation=1, step=6, rank=0, world=1, facts={}, pieces=_piece(1.0))
    assert writer.write(first, SavedStep(step=5, made_in=1, attempt=0, world=1), False) == (16, 16)
    commit(open_store(tmp_path.as_uri()), step=5, made_in=1, attempt=0, committed_in=1, world=1)
    assert writer.write(again, SavedStep(step=6, made_in=1, attempt=0, world=1), False) == (16, 0)


def test_the_last_write_before_a_deadline_ignores_the_bandwidth_limit(tmp_path: Path) -> None:
    """A limit of a byte a second would take four months."""
    writer = CheckpointWriter(open_store(tmp_path.as_uri()), Saving(max_bandwidth=1), 1)
    spec = TensorSpec(key="model/w", dtype="uint8", shape=(10 << 20,))
    piece = Piece(spec=spec, box=Box(start=(0,), stop=(10 << 20,)), data=memoryview(bytes(range(256)) * (10 << 12)))
    last = PinnedSnapshot(generation=1, step=5, rank=0, world=1, facts={}, pieces=[piece])
    assert writer.write(last, SavedStep(step=5, made_in=1, attempt=0, world=1), True)[0] == 10 << 20


def _piece(value: float) -> list[Piece]:
    spec, box = TensorSpec(key="model/w", dtype="float32", shape=(4,)), Box(start=(0,), stop=(4,))
    return [Piece(spec=spec, box=box, data=memoryview(torch.full((4,), value).numpy().tobytes()))]


def test_what_made_a_snapshot_is_written_as_an_object(writer: CheckpointWriter, tmp_path: Path) -> None:
    """It comes as one text; in the record it is read and compared like all other facts, and covered by the root."""
    from checkpointing import commit, open_checkpoint

    facts = {"step": 5, "provenance": '{"code":{},"config":{"lr":0.5},"packages":{}}'}
    snapshot = PinnedSnapshot(generation=1, step=5, rank=0, world=1, facts=facts, pieces=_piece(1.0))
    writer.write(snapshot, SavedStep(step=5, made_in=1, attempt=0, world=1), False)
    store = open_store(tmp_path.as_uri())
    commit(store, step=5, made_in=1, attempt=0, committed_in=1, world=1)
    assert open_checkpoint(store).facts == {
        "step": 5,
        "provenance": {"code": {}, "config": {"lr": 0.5}, "packages": {}},
    }
