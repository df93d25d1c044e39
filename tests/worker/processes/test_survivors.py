"""A process that SIGKILL does not end is told from one that needs its time, and costs the node its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.hung_files import HungFiles
from elastic3d.health.processes import stat_fields
from elastic3d.port import Go
from elastic3d.worker.processes.events import Restored, SlotLost, Started, TemplateDied
from elastic3d.worker.processes.survivors import BLOCKED, EXITING, Survivor, TrainerUnkillable, due, survivors
from tests.worker.keepers import Nursery, assignment, eventually, gone


@pytest.mark.parametrize(
    ("state", "exiting", "patience"),
    [
        ("D", False, BLOCKED),  # it waits for what may never come
        ("D", True, EXITING),  # it gives its memory back, or closes a device
        ("R", True, EXITING),
        ("R", False, EXITING),  # it did not get a processor yet, or loops in the kernel
        ("S", False, EXITING),
    ],
)
def test_how_long_a_process_may_outlive_sigkill(state: str, exiting: bool, patience: float) -> None:
    """Only one that waits within the kernel, and has not begun to exit, is given up soon."""
    survivor = Survivor(pid=7, state=state, exiting=exiting)
    assert not due(survivor, patience - 0.1)
    assert due(survivor, patience)


def test_the_message_says_what_it_waits_for_and_what_to_do() -> None:
    """For whoever has to see to the machine."""
    error = TrainerUnkillable(Survivor(pid=7, state="D", exiting=False, wchan="rpc_wait_bit_killable"), 11.2)
    for part in ("process 7", "state D, in rpc_wait_bit_killable", "11 s after SIGKILL", "goes on without this node"):
        assert part in str(error)


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungFiles]:
    """Mount files that never answer."""
    files = HungFiles(tmp_path / "hung")
    try:
        files.__enter__()
    except OSError as error:
        pytest.skip(f"no FUSE file system can be mounted here: {error}")
    yield files
    files.__exit__(None, None, None)


def looks_for(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.path.exists({str(path)!r})"])


def waits(pid: int, hung: HungFiles) -> bool:
    """Return whether a process waits for a file system that has heard it, so that SIGKILL takes nothing back."""
    within = Path(f"/proc/{pid}/wchan").read_text().startswith(("request_wait_answer", "fuse"))
    return within and hung.unanswered > 0


def test_who_outlives_sigkill_is_seen_whatever_it_waits_for(hung: HungFiles) -> None:
    """One that was not killed is none, nor is a zombie; and it ends once it is answered."""
    process = looks_for(hung.name)
    try:
        assert eventually(lambda: waits(process.pid, hung), 30)
        assert survivors([process.pid]) == []
        process.kill()
        assert eventually(lambda: stat_fields(process.pid)[:1] == ["D"], 30)
        (survivor,) = survivors([process.pid])
        assert (survivor.pid, survivor.state, survivor.exiting) == (process.pid, "D", False)
    finally:
        hung.release()
    assert eventually(lambda: survivors([process.pid]) == [], 30)
    assert process.wait(30) == -signal.SIGKILL
    assert survivors([os.getpid(), process.pid]) == []


@pytest.mark.long
def test_a_trainer_that_cannot_be_killed_takes_its_slot_along(nursery: Nursery, hung: HungFiles) -> None:
    """It is reported by name. The template has done what it could and is left alone, with the next trainer."""
    keeper = nursery.keeper("looks")
    trainer = keeper.slot.prepare(assignment(node=str(hung.name)))
    keeper.slot.go(trainer, Go(servers=()))
    pid = keeper.wait(Started).pid
    keeper.wait(Restored)
    assert eventually(lambda: waits(pid, hung), 30)
    keeper.slot.stop(trainer)
    following = keeper.slot.prepare(assignment(generation=2, node=str(hung.folder)))
    assert following != trainer
    lost = keeper.wait(SlotLost, 60)
    assert f"process {pid} waits within the kernel (state D" in lost.detail
    assert not [event for event in keeper.seen if isinstance(event, TemplateDied)]
    assert "trainer.unkillable" in keeper.output.read_text()
    keeper.slot.close()
    assert eventually(lambda: gone(keeper.pid), 30), "the keeper ends though its trainer does not"
    hung.release()
    assert eventually(lambda: gone(pid), 30)
