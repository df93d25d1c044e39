"""What a trainer makes of torch's words for a data loader's process that was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.utils.data

from elastic3d.devices.oom_killer import KillCount
from elastic3d.worker.processes import channel
from elastic3d.worker.processes.channel import KeeperEnd
from elastic3d.worker.processes.events import ExitKind, RaisedException
from elastic3d.worker.processes.loaders import killed_by
from elastic3d.worker.processes.process import ExitCode
from elastic3d.worker.processes.slot_trainer import SlotTrainer
from tests.worker.keepers import assignment

KILLED = "DataLoader worker (pid 42) is killed by signal: Killed. "
SHORT = (
    "DataLoader worker (pid 42) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (KILLED, signal.SIGKILL),
        (SHORT, signal.SIGBUS),
        ("DataLoader worker (pid(s) 42) exited unexpectedly", 0),
        ("DataLoader worker (pid 42) exited unexpectedly with exit code 1. Details are lost.", 0),
        ("killed by signal: Killed.", 0),
    ],
)
def test_the_signal_is_read_from_what_torch_says(said: str, number: int) -> None:
    """Only from the words of its handler: a process that ends by itself was killed by nobody."""
    assert killed_by(RuntimeError(said)) == number
    assert killed_by(ValueError(said)) == 0


def test_it_is_read_from_an_error_that_came_of_it() -> None:
    """Also where a script made another error of it."""
    outer = ValueError("no batch")
    outer.__context__ = RuntimeError("DataLoader worker (pid(s) 42) exited unexpectedly")
    outer.__context__.__cause__ = RuntimeError(KILLED)
    assert killed_by(outer) == signal.SIGKILL


class Kills(torch.utils.data.Dataset[int]):
    """Its process is killed at the second sample."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            signal.raise_signal(signal.SIGKILL)
        return index


def test_torch_says_what_is_read() -> None:
    """The words are those of the torch that is installed."""
    with pytest.raises(RuntimeError) as raised:
        list(torch.utils.data.DataLoader(Kills(), num_workers=1, multiprocessing_context="fork"))
    assert killed_by(raised.value) == signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "counted"), [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGBUS, True)]
)
def test_only_the_kernels_kill_of_it_is_for_want_of_memory(number: int, counted: bool, tmp_path: Path) -> None:
    """As for the trainer itself: by SIGKILL, and where the control group counts such a kill."""
    file = tmp_path / "memory.events"
    file.write_text("oom_kill 1\n" if counted else "oom_kill 0\n")
    said = RaisedException(kind="RuntimeError", message=KILLED, traceback="", loader=number)
    ours, theirs = channel.pair()
    with ours, theirs:
        end = KeeperEnd(ours)
        trainer = SlotTrainer(number=1, assignment=assignment(rank=3), end=end, theirs=None)
        trainer.last, trainer.kills = channel.MainRaised(peer=False, exception=said), KillCount(file=file)
        ended = trainer.exited(0, ExitCode.ERROR, waited=False)
    short = counted and number == signal.SIGKILL
    assert ended.kind is (ExitKind.OUT_OF_MEMORY if short else ExitKind.CRASH)
    assert "a process of the data loader of rank 3" in ended.detail
    assert (ended.short is not None) is short


def test_errors_that_cause_each_other_are_looked_through_once() -> None:
    """Code that raises the cause of what it handles makes such a chain."""
    outer, inner = RuntimeError("outer"), RuntimeError("inner")
    outer.__cause__, inner.__context__ = inner, outer
    assert killed_by(outer) == killed_by(inner) == 0
