"""A slot's life with real keepers, templates and trainers."""

from __future__ import annotations

import os
import queue
import signal
import threading

import pytest

from chaos.machine.flips import flip
from checkpointing.format.tiles import digest
from elastic3d.errors import MembershipError
from elastic3d.port import Go
from elastic3d.snapshots.client import inventories
from elastic3d.snapshots.lending import borrow
from elastic3d.snapshots.memory import SnapshotName
from elastic3d.worker.processes.events import (
    ExitKind,
    ProfileMeasured,
    Restored,
    SnapshotTaken,
    Started,
    StepFinished,
    TrainerExited,
    TrainerReady,
)
from elastic3d.worker.processes.failure import words
from elastic3d.worker.processes.remote import RemoteSlot
from tests.worker.keepers import READER, Nursery, assignment, eventually, gone

GO = Go(servers=())


def test_a_measuring_trainer_reports_the_profile_and_ends(nursery: Nursery) -> None:
    """The profile arrives as an event, then the exit."""
    keeper = nursery.keeper("measure")
    trainer = keeper.slot.measure(assignment(measuring=True))
    assert keeper.wait(ProfileMeasured).profile.parameters == 10
    ended = keeper.wait(TrainerExited)
    assert (ended.trainer, ended.kind) == (trainer, ExitKind.MEASURED)


def test_a_trainer_prepares_starts_steps_and_leaves(nursery: Nursery) -> None:
    """The whole life of a trainer in order, up to the step it left at."""
    keeper = nursery.keeper("steps")
    trainer = keeper.slot.prepare(assignment())
    keeper.wait(Started)
    assert keeper.wait(TrainerReady).trainer == trainer
    keeper.slot.go(trainer, GO)
    assert keeper.wait(Restored).state.source == "none"
    keeper.wait(StepFinished, where=lambda event: event.record.step == 5)
    keeper.slot.ask_leave(trainer)
    ended = keeper.wait(TrainerExited)
    assert ended.kind is ExitKind.LEFT
    assert ended.step == max(event.record.step for event in keeper.seen if isinstance(event, StepFinished))


@pytest.mark.parametrize("nodes", [1000, 3000, 10_000])
def test_a_trainer_is_told_of_any_number_of_nodes(nursery: Nursery, nodes: int) -> None:
    """Its assignment names them all, and need not fit a packet of the kernel."""
    keeper = nursery.keeper("idle")
    names = tuple(f"ip-10-{number // 256}-{number % 256}-17.eu-central-1.compute.internal" for number in range(nodes))
    trainer = keeper.slot.prepare(assignment(nodes=names))
    assert keeper.wait(TrainerReady).trainer == trainer


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ("user_error", ExitKind.ERROR, "the user's own words"),
        ("peer_lost", ExitKind.PEER_LOST, "Connection closed by peer"),
        ("group_fails", ExitKind.PEER_LOST, "a collective of group dp failed on the device: NCCL reports COMM_ERROR"),
        ("system_exit", ExitKind.ERROR, "sys.exit of the user's script"),
    ],
)
def test_an_exception_is_reported_with_its_traceback(nursery: Nursery, entry: str, kind: ExitKind, words: str) -> None:
    """The exit code tells whose fault it was, and the traceback names the user's function."""
    keeper = nursery.keeper(entry)
    keeper.slot.prepare(assignment())
    ended = keeper.wait(TrainerExited)
    assert ended.kind is kind
    assert ended.exception is not None
    assert words in ended.exception.message
    assert "nursery.py" in ended.exception.traceback or kind is ExitKind.PEER_LOST


def test_memory_that_ran_out_is_a_cause_of_its_own(nursery: Nursery) -> None:
    """Whatever the script made of the error; and who held the memory is said."""
    keeper = nursery.keeper("out_of_memory")
    keeper.slot.prepare(assignment())
    ended = keeper.wait(TrainerExited)
    assert ended.kind is ExitKind.OUT_OF_MEMORY
    said = words(ended, "node-1", 3)
    assert "Boom: the batch could not be made\nthe host has " in said
    assert "What helps: a smaller micro_batch" in said.partition("Traceback")[0]


def test_an_exit_code_without_a_last_message_means_nothing(nursery: Nursery) -> None:
    """A library's os._exit with one of our codes is no clean leave."""
    keeper = nursery.keeper("exits_behind_our_back")
    keeper.slot.prepare(assignment())
    assert keeper.wait(TrainerExited).kind is ExitKind.CRASH


def test_a_finished_trainer_flushes_its_output(nursery: Nursery) -> None:
    """It reaches the keeper's own stdout; rank and master are the assignment's, not torchrun's."""
    keeper = nursery.keeper("done")
    keeper.slot.prepare(assignment(rank=3, world=5, store_port=1234, threads=2, interface="lo"))
    ended = keeper.wait(TrainerExited)
    assert (ended.kind, ended.digest) == (ExitKind.DONE, "digest-of-state")
    output = keeper.output.read_text()
    assert "unflushed words from rank 3\nworld 5 master 127.0.0.1:1234" in output
    assert "agent store None" in output
    assert "threads 2 interface lo" in output


def test_stop_kills_and_reaps(nursery: Nursery) -> None:
    """A stopped trainer's process is gone, and reaped, when its exit is reported."""
    keeper = nursery.keeper("idle")
    trainer = keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.slot.stop(trainer)
    assert keeper.wait(TrainerExited).kind is ExitKind.STOPPED
    assert gone(pid)


def test_all_messages_of_a_trainer_arrive_before_its_exit(nursery: Nursery) -> None:
    """Two thousand steps in a burst, then the end: none is lost, and the order holds."""
    keeper = nursery.keeper("floods")
    keeper.slot.go(keeper.slot.prepare(assignment()), GO)
    assert keeper.wait(TrainerExited).kind is ExitKind.DONE
    steps = [event.record.step for event in keeper.seen if isinstance(event, StepFinished)]
    assert steps == list(range(2000))


def test_two_trainers_can_live_side_by_side(nursery: Nursery) -> None:
    """A proposed generation's trainer is built beside the running one, and either can be stopped alone."""
    keeper = nursery.keeper("idle")
    first = keeper.slot.prepare(assignment())
    keeper.wait(TrainerReady)
    keeper.slot.go(first, GO)
    second = keeper.slot.prepare(assignment(generation=2))
    assert keeper.wait(TrainerReady).trainer == second
    keeper.slot.stop(second)
    assert keeper.wait(TrainerExited).trainer == second
    keeper.slot.ask_leave(first)
    ended = keeper.wait(TrainerExited)
    assert (ended.trainer, ended.kind) == (first, ExitKind.LEFT)


def test_closing_leaves_nothing_behind(nursery: Nursery) -> None:
    """The keeper leaves when its first keeper does, and ends template and trainers."""
    keeper = nursery.keeper("idle")
    keeper.slot.prepare(assignment())
    # The template may not have run yet when the slot is there: its trainer is waited for.
    pids = [keeper.wait(Started).pid, keeper.pid, keeper.template]
    keeper.slot.close()
    assert eventually(lambda: all(map(gone, pids)))


def test_the_next_checkpoint_is_requested_when_the_keeper_is_ready(nursery: Nursery) -> None:
    """At once, but not before the previous one is reported, whatever the trainer does meanwhile."""
    keeper = nursery.keeper("continuous")
    trainer = keeper.slot.prepare(assignment())
    keeper.slot.go(trainer, GO)
    first = keeper.wait(SnapshotTaken, where=lambda event: event.checkpoint)
    last = keeper.wait(StepFinished, where=lambda event: event.record.step >= first.step + 8)
    taken = [event for event in keeper.seen if isinstance(event, SnapshotTaken) and event.checkpoint]
    assert taken == [first]
    keeper.slot.unpin(first.step)
    keeper.slot.set_ready(True)
    second = keeper.wait(SnapshotTaken, where=lambda event: event.checkpoint)
    assert second.step > last.record.step
    keeper.slot.ask_leave(trainer)
    assert keeper.wait(TrainerExited).kind is ExitKind.LEFT


def test_a_snapshot_that_changes_before_it_is_safe_ends_its_trainer(nursery: Nursery) -> None:
    """As any death would: all go back to the newest step that is safe, which is as it was written."""
    keeper = nursery.keeper("steps")
    trainer = keeper.slot.prepare(assignment())
    keeper.slot.go(trainer, GO)
    keeper.wait(StepFinished)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            flip(keeper.pid)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        ended = keeper.wait(TrainerExited)
    finally:
        over.set()
        changing.join()
    assert (ended.trainer, ended.kind, ended.code) == (trainer, ExitKind.CRASH, -signal.SIGKILL)


def test_a_companion_keepers_memory_is_lent_to_the_node(nursery: Nursery) -> None:
    """A process that is no child of it reads its snapshot where it lies, also after that keeper's death."""
    keeper = nursery.keeper("steps", index=1)
    trainer = keeper.slot.prepare(assignment(slot=1))
    keeper.slot.go(trainer, GO)
    keeper.wait(StepFinished)
    keeper.slot.ask_leave(trainer)
    keeper.wait(TrainerExited)
    keeper.slot.set_credentials(READER)
    newest = max(inventories([keeper.server], READER), key=lambda one: one.step)
    borrowed = borrow(keeper.server, keeper.slot.lender, [SnapshotName(1, newest.step, 0)])
    keeper.slot.close()
    assert eventually(lambda: gone(keeper.pid))
    for tile in newest.tiles():
        assert digest(tile.spec, tile.box, borrowed.fetch(tile)) == tile.digest
    borrowed.close()


def test_a_missing_keeper_is_an_error_of_elastic3d() -> None:
    """A process that waits for another one of its node is told whether trying again helps."""
    with pytest.raises(MembershipError, match=r"did not answer in 0 s.*Trying again helps"):
        RemoteSlot(f"elastic3d-nobody-{os.getpid()}", queue.SimpleQueue(), patience=0.0)
