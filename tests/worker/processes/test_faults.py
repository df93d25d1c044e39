"""Whatever is killed in a slot, nothing hangs, nothing is orphaned and no zombie is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from elastic3d.port import Go
from elastic3d.worker.processes import process
from elastic3d.worker.processes.events import (
    ExitKind,
    Restored,
    SlotLost,
    Started,
    StepFinished,
    TemplateDied,
    TrainerExited,
    TrainerReady,
)
from tests.paths import ROOT
from tests.worker.keepers import Nursery, assignment, children, eventually, gone

GO = Go(servers=())


def group(pid: int) -> list[int]:
    """The pids of a process group."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.getpgid(int(name)) == pid:
                    pids.append(int(name))
            except ProcessLookupError:
                pass
    return pids


def test_a_killed_trainer_is_reported_by_its_signal(nursery: Nursery) -> None:
    """Within a tenth of a second after kill -9, and the slot forks the next at once."""
    keeper, took = nursery.keeper("steps"), []
    for generation in range(1, 4):
        keeper.slot.go(keeper.slot.prepare(assignment(generation=generation)), GO)
        pid = keeper.wait(Started).pid
        keeper.wait(StepFinished)
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        ended = keeper.wait(TrainerExited)
        took.append(time.monotonic() - begun)
        assert (ended.kind, ended.code) == (ExitKind.CRASH, -signal.SIGKILL)
        assert gone(pid)
    # The machine may be busy with anything at any one of them.
    assert min(took) < 0.5, took


def test_a_trainer_that_is_not_understood_has_crashed(nursery: Nursery) -> None:
    """Nobody asked for its end: the job is to hear of it, and why, rather than to wait for its steps."""
    keeper = nursery.keeper("speaks_otherwise")
    keeper.slot.go(keeper.slot.prepare(assignment()), GO)
    exited = keeper.wait(TrainerExited)
    assert exited.kind is ExitKind.CRASH
    assert "what the trainer of rank 0 said was not understood" in exited.detail
    assert "StepSaid" in exited.detail


def test_data_loader_workers_die_with_their_trainer(nursery: Nursery) -> None:
    """They would hold its sockets for seconds: they are dead and reaped when the exit is reported.

    Stopped, they notice nothing themselves: they are killed.
    """
    keeper = nursery.keeper("loader")
    keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    members = group(pid)
    assert len(members) >= 3
    for worker in children(pid):
        os.kill(worker, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    keeper.wait(TrainerExited)
    assert all(map(gone, members))


@pytest.mark.parametrize("victim", ["loader", "trainer", "template"])
def test_no_socket_of_a_loaders_process_is_left(victim: str, nursery: Nursery) -> None:
    """Whichever is killed, the folder that multiprocessing listens in is gone; a killed process removes nothing."""
    with tempfile.TemporaryDirectory(prefix="e3d-") as temp:
        keeper = nursery.keeper("loader", variables={"TMPDIR": temp})
        keeper.slot.prepare(assignment())
        trainer = keeper.wait(Started).pid
        keeper.wait(TrainerReady)
        (template,) = [pid for pid in children(keeper.pid) if children(pid)]
        assert eventually(lambda: any(path.is_socket() for path in Path(temp).rglob("*")))
        os.kill({"loader": children(trainer)[0], "trainer": trainer, "template": template}[victim], signal.SIGKILL)
        ended = keeper.wait(TrainerExited)
        if victim == "loader":
            # Nobody's code has raised: it is as if the trainer itself had been killed.
            assert (ended.kind, ended.short) == (ExitKind.CRASH, None)
            assert ended.detail == "a process of the data loader of rank 0 was killed by SIGKILL"
        assert not list(Path(temp).rglob("*"))


def test_a_trainer_without_such_processes_makes_no_folder_for_them(nursery: Nursery) -> None:
    """A node that is killed would leave it."""
    with tempfile.TemporaryDirectory(prefix="e3d-") as temp:
        keeper = nursery.keeper("steps", variables={"TMPDIR": temp})
        keeper.slot.go(keeper.slot.prepare(assignment()), GO)
        keeper.wait(StepFinished)
        assert not list(Path(temp).iterdir())


def test_an_orphan_in_the_trainers_group_is_reaped_too(nursery: Nursery) -> None:
    """A grandchild whose parent ended long ago dies with the group, and leaves no zombie at the template."""
    keeper = nursery.keeper("escapes")
    trainer = keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    assert eventually(lambda: len(group(pid)) == 2)
    keeper.slot.stop(trainer)
    keeper.wait(TrainerExited)
    assert group(pid) == []
    assert children(keeper.template) == []


def test_a_killed_keeper_ends_all_its_processes(nursery: Nursery) -> None:
    """Template, trainer and data-loader workers, which are stopped and notice nothing themselves."""
    keeper = nursery.keeper("loader")
    keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    everybody = {keeper.pid, keeper.template, *group(pid)}
    assert len(everybody) >= 5
    for worker in children(pid):
        os.kill(worker, signal.SIGSTOP)
    os.kill(keeper.pid, signal.SIGKILL)
    assert eventually(lambda: all(map(gone, everybody))), [p for p in everybody if not gone(p)]


def test_a_killed_template_is_replaced_by_the_one_in_reserve(nursery: Nursery) -> None:
    """Its trainer dies with it, the keeper of the snapshots stays; the next fork waits for no import."""
    keeper = nursery.keeper("loader")
    keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    dead, reserve = keeper.both_templates()
    everybody = {dead, *group(pid)}
    os.kill(dead, signal.SIGKILL)
    keeper.wait(TemplateDied)
    second = keeper.slot.prepare(assignment(generation=2))
    # The next trainer may be there before the end of the last one is reported.
    keeper.wait(TrainerReady, 60, lambda event: event.trainer == second)
    (started,) = [event for event in keeper.seen if isinstance(event, Started) and event.trainer == second]
    exits = [event for event in keeper.seen if isinstance(event, TrainerExited)]
    assert (exits or [keeper.wait(TrainerExited)])[0].kind is ExitKind.TEMPLATE
    assert all(map(gone, everybody))
    assert keeper.template == reserve
    assert children(reserve) == [started.pid]
    # An interpreter of its own, running the same script, is the next reserve: not a fork of a keeper with threads.
    assert eventually(lambda: len(keeper.templates) == 2, 60)
    successor = keeper.templates[1]
    command = Path(f"/proc/{keeper.pid}/cmdline").read_bytes()
    assert eventually(lambda: Path(f"/proc/{successor}/cmdline").read_bytes() == command, 60)


def test_two_killed_templates_are_replaced_by_a_new_interpreter(nursery: Nursery) -> None:
    """One after the other, sooner than a new one could be warm."""
    keeper = nursery.keeper("idle")
    for template in keeper.both_templates():
        os.kill(template, signal.SIGKILL)
    keeper.wait(TemplateDied)
    trainer = keeper.slot.prepare(assignment())
    assert keeper.wait(Started, seconds=100.0).trainer == trainer
    keeper.wait(TrainerReady)


def test_a_stopped_template_is_replaced(nursery: Nursery) -> None:
    """A template that does not obey is killed, together with its trainer."""
    keeper = nursery.keeper("idle")
    trainer = keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    os.kill(keeper.template, signal.SIGSTOP)
    keeper.slot.stop(trainer)
    assert keeper.wait(TrainerExited, seconds=30.0).kind is ExitKind.STOPPED
    assert gone(pid)


def test_a_trainer_that_ends_below_a_stopped_template_is_heard_of(nursery: Nursery) -> None:
    """Its last words count: the template that was to tell its exit code is killed for its silence."""
    keeper = nursery.keeper("floods")
    trainer = keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    os.kill(keeper.template, signal.SIGSTOP)
    keeper.slot.go(trainer, GO)
    assert keeper.wait(TrainerExited, seconds=30.0).kind is ExitKind.DONE
    assert gone(pid)


def test_a_new_template_dies_with_its_keeper_while_it_still_imports(nursery: Nursery) -> None:
    """The parent-death signal is set before the imports, which take seconds."""
    keeper = nursery.keeper("idle")
    killed = keeper.both_templates()
    for template in killed:
        os.kill(template, signal.SIGKILL)
    keeper.wait(TemplateDied)
    successors: list[int] = []

    def replaced() -> bool:
        successors[:] = [template for template in keeper.templates if template not in killed]
        return bool(successors)

    assert eventually(replaced, 60)
    successor = successors[0]
    os.kill(keeper.pid, signal.SIGKILL)
    assert eventually(lambda: gone(keeper.pid) and gone(successor), seconds=2.0)


def test_signals_to_the_keepers_group_do_not_reach_trainers(nursery: Nursery) -> None:
    """torchrun ends its workers by SIGTERM to their group; the trainer goes on until the keeper has drained it."""
    keeper = nursery.keeper("steps")
    trainer = keeper.slot.prepare(assignment())
    keeper.slot.go(trainer, GO)
    keeper.wait(Restored)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(keeper.template, number)
    os.killpg(os.getpgid(keeper.pid), signal.SIGTERM)
    step = keeper.wait(StepFinished).record.step
    keeper.wait(StepFinished, where=lambda event: event.record.step > step + 5)
    keeper.slot.ask_leave(trainer)
    assert keeper.wait(TrainerExited).kind is ExitKind.LEFT


def test_sigterm_ends_a_single_trainer(nursery: Nursery) -> None:
    """The template ignores it, a trainer does not."""
    keeper = nursery.keeper("idle")
    keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady)
    os.kill(pid, signal.SIGTERM)
    assert keeper.wait(TrainerExited).code == -signal.SIGTERM


@pytest.mark.long
def test_fifty_forks_leak_no_descriptors(nursery: Nursery) -> None:
    """Keeper, template and trainer have as many after fifty trainers as after three."""
    keeper = nursery.keeper("idle")

    def one() -> tuple[int, int, int]:
        keeper.slot.stop(keeper.slot.prepare(assignment()))
        keeper.wait(TrainerExited)
        trainer = keeper.slot.prepare(assignment())
        pid = keeper.wait(Started).pid
        keeper.wait(TrainerReady)
        counts = tuple(len(os.listdir(f"/proc/{p}/fd")) for p in (keeper.pid, keeper.template, pid))
        keeper.slot.stop(trainer)
        keeper.wait(TrainerExited)
        return counts  # type: ignore[return-value]

    for _ in range(3):
        first = one()
    for _ in range(22):
        last = one()
    assert first == last
    assert children(keeper.template) == []


@pytest.mark.long
def test_a_script_with_threads_gets_new_interpreters(nursery: Nursery) -> None:
    """If a fork is not safe each trainer is an interpreter of its own, and says so; the rules stay the same."""
    keeper = nursery.keeper("idle", threads_before=True)
    assert "user-thread" in keeper.output.read_text()
    trainer = keeper.slot.prepare(assignment())
    pid = keeper.wait(Started).pid
    keeper.wait(TrainerReady, seconds=60.0)
    assert os.getpgid(pid) == pid
    bare = keeper.template
    keeper.slot.go(trainer, GO)
    keeper.wait(Restored)
    os.kill(keeper.pid, signal.SIGKILL)
    assert eventually(lambda: all(map(gone, (keeper.pid, bare, pid))), seconds=2.0)
    assert not process.session_members(bare)


@pytest.mark.long
def test_a_template_that_never_becomes_ready_costs_the_slot(nursery: Nursery) -> None:
    """Templates that end before they are ready are not restarted for ever."""
    keeper = nursery.keeper("idle", broken_again=True)
    for template in keeper.both_templates():
        os.kill(template, signal.SIGKILL)
    trainer = keeper.slot.prepare(assignment())
    lost = keeper.wait(SlotLost, seconds=200.0)
    assert "never got as far as calling elastic3d.run" in lost.detail
    assert keeper.wait(TrainerExited).trainer == trainer
    assert eventually(lambda: children(keeper.pid) == [])


def test_a_machine_that_starts_no_template_costs_the_slot_only_when_it_needs_one(
    nursery: Nursery, tmp_path: Path
) -> None:
    """The reserve is not needed: a job goes on though its folder was removed. What failed is said."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    keeper = nursery.keeper("idle", directory=folder)
    trainer = keeper.slot.prepare(assignment())
    keeper.wait(TrainerReady)
    template, reserve = keeper.both_templates()
    folder.rmdir()
    os.kill(reserve, signal.SIGKILL)
    assert eventually(lambda: "could not be started: [Errno 2]" in keeper.output.read_text(), 30)
    keeper.slot.go(trainer, GO)
    keeper.wait(Restored)
    os.kill(template, signal.SIGKILL)
    lost = keeper.wait(SlotLost)
    assert "the template was killed by SIGKILL; another could not be started: [Errno 2]" in lost.detail


HAZARD = """
import torch
from elastic3d.worker.processes import process
assert process.fork_hazard() is None, process.fork_hazard()
torch.ones(512, 512).mm(torch.ones(512, 512))
print(torch.get_num_threads(), process.fork_hazard())
"""


@pytest.mark.parametrize(("threads", "safe"), [(1, True), (2, False)])
def test_tensor_maths_before_run_makes_forks_unsafe(threads: int, safe: bool) -> None:
    """On one thread it does no harm; on two the child would hang, which is tried, not assumed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        [sys.executable, "-c", HAZARD], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split(maxsplit=1)
    assert said[0] == str(threads)
    assert (said[1].strip() == "None") is safe
