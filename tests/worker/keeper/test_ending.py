"""The end of a run: the state that `main` left is in the store before its return is reported."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from checkpointing import open_store, read_latest
from elastic3d.errors import StateError
from elastic3d.membership import events as m
from elastic3d.membership.records import SavedStep
from elastic3d.rendezvous.settings import Settings
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.departure import HELD_PATIENCE, LAST_PATIENCE, LeaveRequest
from elastic3d.worker.keeper.ending import END_PATIENCE, Ending
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.options import RunOptions, Saving
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import PinnedSnapshot, SlotPort
from elastic3d.worker.pulse import Figures
from tests.worker.checkpoints.test_checkpoints import Memory
from tests.worker.checkpoints.test_uploader import generation


class Forgetful(Memory):
    """A slot whose snapshot cannot be read the first few times."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    @contextmanager
    def pieces(self, step: int) -> Iterator[PinnedSnapshot]:
        if self.failures:
            self.failures -= 1
            raise StateError("not now")
        with super().pieces(step) as pinned:
            yield pinned


class Later:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Scene:
    """One leading node of one slot; `events` is what the membership received."""

    def __init__(self, folder: Path, *, failures: int = 0) -> None:
        self.events: list[m.Event] = []
        self.settled: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.store = open_store(str(folder / "store"))
        self.clock = Later()
        slots = [cast(SlotPort, Forgetful(failures))]
        journal, figures = Journal(None, "run", "node"), Figures()
        self.generations = Generations(
            cast(Settings, None),
            RunOptions(),
            slots,
            self.events.append,
            journal=journal,
            figures=figures,
            clock=cast(Any, self.clock),
        )
        self.checkpoints = Checkpoints(
            self.store,
            Saving(),
            slots,
            self.inbox.put,
            journal=journal,
            figures=figures,
            rest=lambda _: 1.0,
            settled=lambda saved, error: self.settled.put((saved, error)),
        )
        self.checkpoints.fence(1)
        self.ending = Ending(self.generations, self.checkpoints, self.events.append, clock=cast(Any, self.clock))

    def returned(self, unsaved: int) -> None:
        """Let `main` return on the only slot."""
        self.generations.worlds["1.0"] = TrainerGroup(generation=generation(1), first_rank=0, trainers={0: 1})
        ended = w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.DONE, step=9, code=0, unsaved=unsaved)
        self.generations.heard(ended)
        self.ending.look()

    def wrote(self) -> TilesUploaded | WriteFailed:
        """Process the outcome of one write, as the keeper does."""
        said = self.inbox.get(timeout=30)
        assert isinstance(said, TilesUploaded | WriteFailed)
        self.ending.heard(said)
        saved = self.checkpoints.heard(said)
        if saved is not None:
            self.events.append(m.Saved(saved=saved))
            self.checkpoints.commit(saved, 1)
        self.ending.look()
        return said

    def close(self) -> None:
        self.checkpoints.close_uploaders(10.0)
        self.checkpoints.close_committer(10.0)


@pytest.fixture
def scenes(tmp_path: Path) -> Iterator[Any]:
    made: list[Scene] = []

    def make(**given: int) -> Scene:
        made.append(Scene(tmp_path, **given))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


def test_the_last_step_is_written_before_the_node_has_finished(scenes: Any) -> None:
    """No checkpoint was due at step 9: one is made, the save is reported first, and the leader learns of its commit."""
    scene = scenes()
    scene.returned(9)
    assert scene.events == []
    assert isinstance(scene.wrote(), TilesUploaded)
    assert [type(event) for event in scene.events] == [m.Saved, m.MainFinished]
    saved, error = scene.settled.get(timeout=30)
    assert (saved.step, error) == (9, "")
    ref = read_latest(scene.store)
    assert ref is not None
    assert ref.step == 9
    # A leader that leads again asks again, and gets its answer.
    scene.checkpoints.commit(saved, 1)
    assert scene.settled.get(timeout=30) == (saved, "")


def test_a_last_step_in_the_store_is_not_written_again(scenes: Any) -> None:
    """A run restarted after its end has nothing to add."""
    scene = scenes()
    scene.returned(-1)
    assert [type(event) for event in scene.events] == [m.MainFinished]


def test_a_failed_last_write_is_retried(scenes: Any) -> None:
    """A store that fails for a moment costs that moment, not the last step."""
    scene = scenes(failures=2)
    scene.returned(9)
    for _ in range(2):
        assert isinstance(scene.wrote(), WriteFailed)
        assert scene.events == []
        scene.clock.now += 2.0
        scene.ending.look()
    assert isinstance(scene.wrote(), TilesUploaded)
    assert isinstance(scene.events[-1], m.MainFinished)


def test_a_last_step_that_cannot_be_written_is_an_error(scenes: Any) -> None:
    """After a while it is an error of the generation, with its reason, and counts as one of the job's tries."""
    scene = scenes(failures=100)
    scene.returned(9)
    assert isinstance(scene.wrote(), WriteFailed)
    scene.clock.now += END_PATIENCE + 1.0
    scene.ending.look()
    (event,) = scene.events
    assert isinstance(event, m.TrainerFailed)
    assert event.error
    assert "the last step, 9, could not be brought to the store: not now" in event.detail


def test_a_node_with_a_failed_slot_has_not_finished(scenes: Any) -> None:
    """Even if another slot returned afterwards."""
    scene = scenes()
    world = TrainerGroup(generation=generation(1), first_rank=0, trainers={0: 1, 1: 2})
    scene.generations.worlds["1.0"] = world
    world.failed = True
    world.ended[1] = 9
    scene.generations.heard(w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.DONE, step=9, code=0))
    scene.ending.look()
    assert not [event for event in scene.events if isinstance(event, m.MainFinished)]


@pytest.mark.parametrize("asked", [True, False])
def test_trainers_that_left_before_their_node_was_asked_have_not_left(scenes: Any, asked: bool) -> None:
    """Others asked first: whoever takes the last snapshot over is not known yet. It is not waited for for ever."""
    scene = scenes()
    leaving = LeaveRequest(
        scene.generations, None, scene.events.append, journal=Journal(None, "run", "n"), drain=25.0, clock=scene.clock
    )
    world = TrainerGroup(generation=generation(1), first_rank=0, trainers={0: 1}, held={0: 9})
    scene.generations.worlds["1.0"] = world
    scene.generations.heard(w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.LEFT, step=9, code=0))
    leaving.look()
    assert scene.events == []
    if asked:
        leaving.ask_leave("1.0")
    else:
        scene.clock.now += HELD_PATIENCE + 0.1
    leaving.look()
    assert scene.events == [m.Left(key="1.0", step=9)]


@pytest.mark.parametrize("mended", [True, False])
def test_a_node_leaves_after_a_failed_last_write_only_when_its_time_is_up(scenes: Any, mended: bool) -> None:
    """No node takes over from memory: the state is written again until it is in the store, or no time is left."""
    scene = scenes(failures=1 if mended else 100)
    leaving = LeaveRequest(
        scene.generations,
        scene.checkpoints,
        scene.events.append,
        journal=Journal(None, "run", "n"),
        drain=25.0,
        clock=scene.clock,
    )
    scene.generations.worlds["1.0"] = TrainerGroup(generation=generation(1), first_rank=0, trainers={0: 1}, held={0: 9})
    scene.generations.heard(w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.LEFT, step=9, code=0))
    leaving.ask_leave("1.0")
    leaving.look()
    for done in (False, mended):
        said = scene.inbox.get(timeout=30)
        assert isinstance(said, TilesUploaded if done else WriteFailed)
        leaving.heard(said)
        leaving.look()
        assert scene.events == ([m.Left(key="1.0", step=9)] if done else [])
        scene.clock.now += 1.5
        leaving.look()
    scene.clock.now += LAST_PATIENCE
    leaving.look()
    assert scene.events == [m.Left(key="1.0", step=9)]


def test_an_older_generations_write_is_not_that_of_the_last_state(scenes: Any) -> None:
    """The same step, made again: what a former generation wrote of it is another save."""
    scene = scenes(failures=100)
    leaving = LeaveRequest(
        scene.generations, scene.checkpoints, scene.events.append, journal=Journal(None, "run", "n"), drain=25.0
    )
    world = TrainerGroup(generation=generation(2), first_rank=0, trainers={0: 1}, leaving_since=100.0, flushing=True)
    world.ended[0] = 9
    scene.generations.worlds["2.0"] = world
    saved = SavedStep(step=9, made_in=1, attempt=0, world=1)
    leaving.heard(TilesUploaded(slot=0, saved=saved, bytes=4, new=4))
    assert not world.flushed
    leaving.heard(TilesUploaded(slot=0, saved=replace(saved, made_in=2), bytes=4, new=4))
    assert world.flushed == {0}


def test_the_end_of_a_generation_that_another_follows_is_not_waited_for(scenes: Any) -> None:
    """Its node died before all had finished: the next one makes the end, and is not told of by the former's writes."""
    scene = scenes(failures=1)
    scene.returned(9)
    assert isinstance(scene.wrote(), WriteFailed)
    scene.generations.stop("1.0")
    scene.clock.now += 2 * END_PATIENCE
    scene.ending.look()
    assert scene.ending.pause is None
    assert scene.events == []


def test_a_last_step_that_failed_while_main_went_on_is_written_again(tmp_path: Path) -> None:
    """In its evaluation, say: nobody waited for that write yet."""
    scene = Scene(tmp_path, failures=1)
    try:
        scene.checkpoints.offer(0, 9, generation(1))
        assert isinstance(scene.wrote(), WriteFailed)
        scene.returned(9)
        assert isinstance(scene.wrote(), TilesUploaded)
        assert any(isinstance(event, m.MainFinished) for event in scene.events)
    finally:
        scene.close()
