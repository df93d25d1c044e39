"""Event files, followed while they grow, whatever is in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic3d.dashboard import event_files
from elastic3d.dashboard.event_files import EventFolder
from elastic3d.errors import UsageError
from elastic3d.log import EventLog


def step(log: EventLog, number: int, generation: int = 1, loss: float = 2.5) -> None:
    log.emit("step.committed", step=number, loss=loss.hex(), seconds=0.5, generation=generation)


def seen(folder: EventFolder) -> list[tuple[int, int]]:
    return [(figures.generation, figures.step) for figures in folder.look().steps]


def test_steps_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Each once; rank 0 may move to another node, whose file is another one."""
    folder = EventFolder(tmp_path)
    assert seen(folder) == []
    with EventLog(tmp_path / "a-0.jsonl", run="gpt-1b", node="a") as one, EventLog(tmp_path / "b-0.jsonl") as other:
        step(one, 1)
        step(one, 2, loss=float("nan"))
        one.flush(5.0)
        assert seen(folder) == [(1, 1), (1, 2)]
        step(other, 2, generation=2)
        step(other, 3, generation=2)
        step(one, 3)
        for log in (one, other):
            log.flush(5.0)
        assert seen(folder) == [(1, 3), (2, 2), (2, 3)]
        assert seen(folder) == []


def test_a_file_that_is_renamed_while_it_is_read_loses_nothing(tmp_path: Path) -> None:
    """Past half its limit an event file becomes `.1`, and a new one begins."""
    folder, steps = EventFolder(tmp_path), []
    with EventLog(tmp_path / "a-0.jsonl", limit=2000) as log:
        for number in range(1, 40):
            step(log, number)
            log.flush(5.0)
            if number % 3 == 0:
                steps += [one for _, one in seen(folder)]
    assert (tmp_path / "a-0.jsonl.1").exists()
    assert steps == list(range(1, 40))


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """A writer may be in the middle of it."""
    folder, path = EventFolder(tmp_path), tmp_path / "a-0.jsonl"
    line = json.dumps(
        {"event": "step.committed", "at": 1.0, "step": 4, "loss": "0x1p+0", "seconds": 1, "generation": 1}
    )
    path.write_text(line[:20])
    assert seen(folder) == []
    with path.open("a") as file:
        file.write(line[20:] + "\n")
    assert seen(folder) == [(1, 4)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xfe\n",
        b"[]\nnull\n3\n",
        b'{"event": 3, "at": 1}\n',
        b'{"event": "step.committed", "at": 1e999}\n',
        b'{"event": "step.committed", "at": 1, "step": "x", "seconds": 1}\n',
        b'{"event": "step.committed", "at": 1, "step": 1, "seconds": 1, "loss": "0xzz"}\n',
        b'{"event": "node.lying", "at": 1, "step": [], "nodes": 7}\n',
        b'{"event": "loss.spiked", "at": 1, "step": {}, "usual": null}\n',
        b"[" * 100_000 + b"\n",
        b'{"event": "loss.spiked", "at": 1' + b"0" * 400 + b"}\n",
        b'{"event": "node.lying", "at": 1, "step": Infinity, "nodes": [[["x"]]]}\n',
        b'{"event": "node.slow", "at": 1, "generation": "\xf0", "detail": {"a": [1]}}\n',
    ],
)
def test_anything_else_is_passed_over(tmp_path: Path, garbage: bytes) -> None:
    """And what comes after it is read."""
    path = tmp_path / "a-0.jsonl"
    path.write_bytes(garbage)
    folder = EventFolder(tmp_path)
    folder.look()
    with EventLog(path) as log:
        step(log, 5)
    assert seen(folder) == [(1, 5)]


def test_of_a_huge_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several looks, the page being there meanwhile; a line without end is no event."""
    monkeypatch.setattr(event_files, "FIRST", 4000)
    monkeypatch.setattr(event_files, "MOST", 1000)
    monkeypatch.setattr(event_files, "LONGEST", 500)
    path = tmp_path / "a-0.jsonl"
    with EventLog(path) as log:
        for number in range(200):
            step(log, number)
    folder, steps = EventFolder(tmp_path), []
    for _ in range(20):
        steps += [one for _, one in seen(folder)]
    assert steps == list(range(steps[0], 200))
    assert 10 < len(steps) < 60
    with path.open("ab") as file:
        file.write(b"x" * 5000 + b"\n")
    with EventLog(path) as log:
        step(log, 300)
    steps = []
    for _ in range(20):
        steps += [one for _, one in seen(folder)]
    assert steps == [300]


def test_what_people_should_know_is_kept(tmp_path: Path) -> None:
    """Warnings and errors, and that they are over; of another run nothing."""
    folder = EventFolder(tmp_path, run="gpt-1b")
    with EventLog(tmp_path / "a-0.jsonl", run="gpt-1b", node="a") as log, EventLog(tmp_path / "c.jsonl", run="x") as no:
        log.emit("checkpoint.failed", step=4, error="no space left", age=3.0)
        log.emit("checkpoint.written", step=5, bytes=1, new=1)
        log.emit("node.lying", step=5, micro_batch=1, compared="passes", where="w", ranks=[1], nodes=["b"], detail="d")
        no.emit("checkpoint.failed", step=9, error="of another run", age=3.0)
    folder.look()
    assert [(one.name, one.node, one.said) for one in folder.notables] == [
        ("checkpoint.failed", "a", "no space left"),
        ("node.lying", "a", "d"),
    ]
    assert [trouble.event for trouble in folder.troubles] == ["node.lying"]


def test_a_folder_that_goes_away_is_a_problem_that_is_named(tmp_path: Path) -> None:
    """At the beginning it has to be there; later its absence is shown."""
    with pytest.raises(UsageError, match="there is no such folder"):
        EventFolder(tmp_path / "none")
    (tmp_path / "events").mkdir()
    folder = EventFolder(tmp_path / "events")
    (tmp_path / "events" / "d.jsonl").mkdir()
    folder.look()
    assert "d.jsonl" in folder.problems[0]
    os.rmdir(tmp_path / "events" / "d.jsonl")
    os.rmdir(tmp_path / "events")
    folder.look()
    assert "No such file" in folder.problems[0]
