"""The process that writes events: it outlives signals to its node, and nobody waits for it for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.spoilt_file import SpoiltFile
from elastic3d import log
from elastic3d.event_process import EventProcess
from elastic3d.log import EventLog
from tests.paths import ROOT
from tests.worker.keepers import eventually, gone

pytestmark = pytest.mark.timeout(60)

ENDS = """
import sys
from elastic3d.log import EventLog

log = EventLog(sys.argv[1], node="n0")
for step in range(3):
    log.emit("snapshot.held", step=step)
sys.stdin.readline()
log.close(patience=0.5)
"""


def ends(path: Path) -> subprocess.Popen[bytes]:
    """Return a process that writes three events, and ends once its stdin does."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", ENDS, str(path)], env=environment, stdin=subprocess.PIPE)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def writers() -> list[int]:
    """Return the processes that write events and were started by this thread."""
    started = Path("/proc/thread-self/children").read_text().split()
    return [int(pid) for pid in started if b"event_file.py" in Path("/proc", pid, "cmdline").read_bytes()]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoiltFile]:
    try:
        with SpoiltFile(tmp_path / "spoilt", tmp_path / "n0-0.jsonl") as file:
            yield file
    except PermissionError as error:
        pytest.skip(f"no FUSE file system can be mounted here: {error}")


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_ends_though_the_disk_of_its_events_hangs(file: SpoiltFile, killed: bool) -> None:
    """By itself or by SIGKILL, while a write waits from which no signal wakes; what was written arrives later."""
    file.hang()
    keeper = ends(file.path)
    assert keeper.stdin is not None
    assert eventually(lambda: file.held == 1, 30)
    if killed:
        keeper.kill()
    keeper.stdin.close()
    assert keeper.wait(20) == (-signal.SIGKILL if killed else 0)
    assert file.held == 1
    assert file.path.read_text() == ""
    file.restore()
    assert eventually(lambda: steps(file.path)[:1] == [0], 30)


def test_no_event_is_lost_to_a_disk_that_hangs_for_a_while(file: SpoiltFile) -> None:
    """Those that are emitted meanwhile are written after it."""
    with EventLog(file.path, node="n0") as events:
        file.hang()
        for step in range(200):
            events.emit("snapshot.held", step=step)
        assert not events.flush(0.2)
        assert eventually(lambda: file.held == 1, 30)
        file.restore()
    assert steps(file.path) == list(range(200))


def test_events_are_lost_while_their_disk_is_away(file: SpoiltFile, capfd: pytest.CaptureFixture[str]) -> None:
    """It is said once, and why; later ones are written."""
    with EventLog(file.path, node="n0") as events:
        file.refuse()
        for step in range(3):
            events.emit("snapshot.held", step=step)
        assert events.flush(30)
        file.restore()
        events.emit("snapshot.held", step=3)
    assert steps(file.path) == [3]
    assert (
        capfd.readouterr().err == f"elastic3d: events are lost until {file.path} can be written: Input/output error\n"
    )


def test_a_log_begins_though_its_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a pipe does that nobody has opened: after a while it goes on, and what it took arrives later."""
    monkeypatch.setattr(log, "OPENING", 0.2)
    path = tmp_path / "n0-0.jsonl"
    os.mkfifo(path)
    lines: list[str] = []
    with EventLog(path, node="n0") as events:
        events.emit("snapshot.held", step=1)
        assert not events.flush(0.2)
        reader = threading.Thread(target=lambda: lines.extend(path.read_text().splitlines()))
        reader.start()
        assert events.flush(30)
    reader.join(30)
    assert [json.loads(line)["step"] for line in lines] == [1]


def test_a_file_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """It names the folder where that is at fault; no process is left."""
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match=r"File exists: '.*/file'"):
        EventLog(tmp_path / "file" / "n0-0.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*/folder.jsonl'"):
        EventLog(tmp_path / "folder.jsonl")
    assert writers() == []


def test_one_that_was_killed_is_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is emitted just then is lost, which is said."""
    path = tmp_path / "n0-0.jsonl"
    with EventLog(path, node="n0") as events:
        for step in range(3):
            events.emit("snapshot.held", step=step)
            assert events.flush(30)
            if step == 0:
                (writer,) = writers()
                os.kill(writer, signal.SIGKILL)
    assert steps(path) == [0, 2]
    assert "the process that writes it has ended" in capfd.readouterr().err


def test_one_that_is_killed_before_it_has_opened_the_file_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be what the machine runs out of memory for while the disk hangs; the loss is said as any other."""
    monkeypatch.setattr(log, "OPENING", 0.2)
    path = tmp_path / "n0-0.jsonl"
    os.mkfifo(path)
    lines: list[str] = []
    with EventLog(path, node="n0") as events:
        events.emit("snapshot.held", step=0)
        (writer,) = writers()
        os.kill(writer, signal.SIGKILL)
        assert events.flush(30)
        reader = threading.Thread(target=lambda: lines.extend(path.read_text().splitlines()))
        reader.start()
        events.emit("snapshot.held", step=1)
        assert events.flush(30)
    reader.join(30)
    assert [json.loads(line)["step"] for line in lines] == [1]
    assert capfd.readouterr().err == (
        f"elastic3d: events are lost until {path} can be written: the process that writes it has ended\n"
    )


@pytest.mark.parametrize("interpreter", ["", "#!/bin/sh\nkill -KILL $$\n"], ids=["not started", "killed at once"])
def test_a_log_begins_though_its_process_does_not(
    interpreter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For each line it is tried again; what is lost is said once, and why."""
    path, other = tmp_path / "n0-0.jsonl", tmp_path / "python"
    if interpreter:
        other.write_text(interpreter)
        other.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(other))
        events = EventLog(path, node="n0")
        for step in range(2):
            events.emit("snapshot.held", step=step)
        assert events.flush(30)
    with events:
        events.emit("snapshot.held", step=2)
    assert steps(path) == [2]
    why = "has ended" if interpreter else "cannot be started: No such file or directory"
    assert capfd.readouterr().err == (
        f"elastic3d: events are lost until {path} can be written: the process that writes it {why}\n"
    )


def test_no_event_is_lost_to_half_a_line_of_an_earlier_process(tmp_path: Path) -> None:
    """Its disk was full, or its keeper was killed in the midst of a line that is longer than a pipe holds."""
    path = tmp_path / "n0-0.jsonl"
    path.write_text('{"node":"n0","st')
    for step in range(2):
        with EventLog(path, node="n0") as events:
            events.emit("snapshot.held", step=step)
    _half, *whole = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in whole] == [0, 1]


def test_signals_to_a_node_do_not_end_what_writes_its_last_events(tmp_path: Path) -> None:
    """Those that ask a keeper to leave, or go to its whole group; with the keeper it ends."""
    process = EventProcess(str(tmp_path / "n0-0.jsonl"), 1 << 20)
    process.open(30)
    (writer,) = writers()
    assert os.getpgid(writer) == writer
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(writer, number)
    process.write(b'{"step":1}\n')
    process.close(30)
    assert steps(tmp_path / "n0-0.jsonl") == [1]
    assert gone(writer)


def test_one_whose_keeper_is_gone_ends_though_its_disk_hangs(tmp_path: Path) -> None:
    """Where the kernel lets it: nobody opens the other end of this pipe."""
    path = tmp_path / "n0-0.jsonl"
    os.mkfifo(path)
    process = EventProcess(str(path), 1 << 20)
    process.open(0.1)
    (writer,) = writers()
    process.close(0.1)
    assert eventually(lambda: os.waitpid(writer, os.WNOHANG)[0] == writer, 30)
