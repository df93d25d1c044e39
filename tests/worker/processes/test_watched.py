"""Trainers that stand still, as their keepers see them."""

from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

from elastic3d.health.options import Watching
from elastic3d.health.phases import Axis
from elastic3d.health.record import SIZE, ProgressWriter
from elastic3d.health.watch import SlotWatch
from elastic3d.membership.stalls import RankState, Wait
from elastic3d.port import Go
from elastic3d.worker.processes.events import ExitKind, RankMoving, RankSilent, Started, StepFinished, TrainerExited
from elastic3d.worker.processes.watching import Watchers
from tests.worker.keepers import Keeper, Nursery, assignment

GO = Go(servers=())
WAIT = Wait(axis="dp", number=1, fingerprint=7)


def trainer_of(keeper: Keeper, **changes: object) -> tuple[int, int]:
    """Start a trainer; return its number and its pid once it has made its steps."""
    trainer = keeper.slot.prepare(assignment(**changes))
    keeper.slot.go(trainer, GO)
    pid = keeper.wait(Started).pid
    keeper.wait(StepFinished, where=lambda event: event.record.step == 5)
    return trainer, pid


def test_a_trainer_that_waits_is_named_with_its_wait_and_its_stack(nursery: Nursery) -> None:
    """And its record is there after somebody has killed it."""
    keeper = nursery.keeper("waiting", watched=True)
    trainer, pid = trainer_of(keeper, recorded=True, rank=3)
    silent = keeper.wait(RankSilent, where=lambda event: event.rank.top_frame != "")
    assert (silent.trainer, silent.over, silent.rank.rank) == (trainer, True, 3)
    assert (silent.rank.step, silent.rank.phase, silent.rank.wait) == (5, "forward", WAIT)
    assert silent.rank.top_frame.startswith("nursery.py:")
    assert silent.rank.top_frame.endswith(" in waiting")
    os.kill(pid, signal.SIGKILL)
    last = keeper.wait(RankSilent, where=lambda event: event.rank.state is RankState.DEAD)
    assert (last.over, last.rank.wait) == (True, WAIT)
    assert keeper.wait(TrainerExited).kind is ExitKind.CRASH


def test_a_stopped_trainer_is_named_and_moves_again(nursery: Nursery) -> None:
    """It is the kernel that says so; nothing is sent to it meanwhile that would take effect later."""
    keeper = nursery.keeper("steps", watched=True)
    trainer, pid = trainer_of(keeper, recorded=True)
    os.kill(pid, signal.SIGSTOP)
    keeper.slot.follow(trainer, True)
    stopped = keeper.wait(RankSilent, where=lambda event: event.rank.state is RankState.STOPPED)
    assert stopped.rank.top_frame == ""
    os.kill(pid, signal.SIGCONT)
    keeper.slot.ask_leave(trainer)
    assert keeper.wait(TrainerExited).kind is ExitKind.LEFT


def test_a_trainer_without_a_record_trains_as_before(nursery: Nursery) -> None:
    """Nobody watches it, and nothing is missing."""
    keeper = nursery.keeper("waiting")
    trainer, _ = trainer_of(keeper, recorded=True)
    keeper.slot.follow(trainer, True)
    keeper.slot.ask_leave(trainer)
    assert keeper.wait(TrainerExited).kind is ExitKind.LEFT
    assert not [event for event in keeper.seen if isinstance(event, RankSilent | RankMoving)]


def test_a_trainer_that_is_aborted_within_a_collective_has_lost_a_peer(nursery: Nursery) -> None:
    """gloo aborts whoever receives what does not fit, and that is not who sent it; elsewhere an abort is its own."""
    keeper = nursery.keeper("waiting", watched=True)
    _, pid = trainer_of(keeper, recorded=True)
    keeper.wait(RankSilent, where=lambda event: event.rank.wait == WAIT)
    os.kill(pid, signal.SIGABRT)
    last = keeper.wait(RankSilent, where=lambda event: event.rank.state is RankState.DEAD)
    assert (last.over, last.rank.wait) == (True, WAIT)
    assert keeper.wait(TrainerExited).kind is ExitKind.PEER_LOST
    keeper = nursery.keeper("steps", watched=True)
    _, pid = trainer_of(keeper, recorded=True)
    os.kill(pid, signal.SIGABRT)
    assert keeper.wait(TrainerExited).kind is ExitKind.CRASH


def test_a_collective_that_was_begun_and_not_waited_for_yet_counts_as_one() -> None:
    """What does not fit may arrive before the rank comes to wait; an operation that is done is none."""
    watchers = Watchers(SlotWatch(watching=Watching(), silent=lambda *_: None, moving=lambda _: None))
    watchers.prepare(1, assignment(recorded=True))
    writer = ProgressWriter(memoryview(mmap.mmap(watchers.descriptors(1)[0], SIZE)))
    assert not watchers.waited(1)
    number = writer.post(Axis.WORLD, 7)
    assert watchers.waited(1)
    writer.leave(Axis.WORLD, number)
    assert not watchers.waited(1)
    watchers.ended(1, ExitKind.LEFT)


def test_the_end_of_a_trainer_whose_record_was_written_over_is_an_end_as_any(nursery: Nursery) -> None:
    """Its slot goes on, and has the next one make steps."""
    keeper = nursery.keeper("steps", watched=True)
    _, pid = trainer_of(keeper, recorded=True)
    descriptors = Path(f"/proc/{keeper.pid}/fd")
    page = next(path for path in descriptors.iterdir() if "elastic3d-progress" in os.readlink(path))
    with page.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as memory, memoryview(memory) as view:
        words = view.cast("Q")
        words[2] = words[8] = 1 << 40
        words.release()
    os.kill(pid, signal.SIGKILL)
    assert keeper.wait(TrainerExited).kind is ExitKind.CRASH
    keeper.slot.go(keeper.slot.prepare(assignment(recorded=True)), GO)
    keeper.wait(StepFinished, where=lambda event: event.record.step == 1)
