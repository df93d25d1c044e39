"""Checks side by side: whatever one of them does, the others are told, and all is over in time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic3d.clock import SYSTEM
from elastic3d.doctor import child, running
from elastic3d.doctor.findings import FindingStatus, Subject, ok
from elastic3d.doctor.running import CheckRun, CheckRuns, NodeCheck
from tests.clocks import HandClock
from tests.doctor.looks import under_way


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has long to remove what was made."""
    monkeypatch.setattr(running, "CLEANING", 0.3)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a check may hang at; the test's end opens it."""
    gate = threading.Event()
    yield gate
    gate.set()


class SinceWritten(HandClock):
    """A clock on which a minute has passed once a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def monotonic(self) -> float:
        return self.now + 60.0 * self.file.exists()


def check(run: Callable[[CheckRun], None], limit: float = 30.0, name: str = "one") -> NodeCheck:
    return NodeCheck(subject=Subject.STORE, name=name, run=run, limit=limit)


def test_a_check_that_hangs_is_named_with_what_it_made(gate: threading.Event) -> None:
    """What it had found is kept, and what the others found."""
    clock = HandClock()

    def hang(run: CheckRun) -> None:
        run.tell(ok(Subject.STORE, "small", "fine"))
        run.go_on("a large object")
        run.making("object probe/x")
        clock.now += 1.0
        gate.wait(60)

    def quick(run: CheckRun) -> None:
        run.tell(ok(Subject.ETCD, "e1", "fine"))

    runs = CheckRuns([check(hang, limit=0.2, name="hangs"), check(quick, name="quick")], limit=30, clock=clock)
    findings = runs.wait()
    assert {one.name for one in findings} == {"small", "hangs", "e1"}
    (late,) = [one for one in findings if one.name == "hangs"]
    assert late.status is FindingStatus.FAILURE
    assert late.seen == "no answer within 0.2 s, at: a large object; object probe/x may be left behind"
    assert runs.stuck
    assert runs.stop() == ("object probe/x",)


def test_a_check_whose_time_is_over_removes_what_it_made() -> None:
    """It is asked to stop, and says what it was at."""
    clock = HandClock()

    def slow(run: CheckRun) -> None:
        run.making("object probe/x")
        try:
            while True:
                run.go_on("reading")
                clock.now += 0.1
        finally:
            run.removed("object probe/x")

    runs = CheckRuns([check(slow)], limit=0.2, clock=clock)
    (late,) = runs.wait()
    assert late.seen == "not done within 0.2 s, at: reading"
    assert not runs.stuck


def test_whoever_gives_up_waits_for_what_was_made_to_be_removed(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hears what could not be."""
    monkeypatch.setattr(running, "CLEANING", 60.0)
    begun, clock = threading.Barrier(3), HandClock()

    def tidy(run: CheckRun) -> None:
        run.making("key a")
        try:
            begun.wait(30)
            while True:
                run.wait(0.01)
        finally:
            run.removed("key a")
            clock.now += 60.0

    def stuck(run: CheckRun) -> None:
        run.making("key b")
        begun.wait(30)
        gate.wait(60)

    runs = CheckRuns([check(tidy), check(stuck, name="two")], limit=600, clock=clock)
    begun.wait(30)
    assert runs.stop() == ("key b",)


def test_a_check_that_fails_itself_is_a_finding() -> None:
    """Whatever it raises, and whatever it left."""

    def fails(run: CheckRun) -> None:
        run.making("key a")
        raise LookupError("unforeseen")

    findings = CheckRuns([check(fails)], limit=30).wait()
    assert [one.seen for one in findings] == [
        "the check itself failed: LookupError: unforeseen",
        "key a could not be removed",
    ]


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """What it said until then is read."""
    hangs = tmp_path / "hangs"
    run = CheckRun(under_way().check, 600.0, SinceWritten(hangs))
    said = child.ask(["sh", "-c", f"echo said; sleep 600 & touch {hangs}; wait"], run, limit=30.0)
    assert (said.output, said.code) == ("said\n", None)


def test_a_program_that_crashes_or_is_not_there_is_told() -> None:
    """By its code and what it said."""
    crashed = child.ask([sys.executable, "-c", "import os; os.abort()"], under_way(), limit=30)
    assert crashed.code == -6
    missing = child.ask(["/no/such/program"], under_way(), limit=30)
    assert missing.code
    assert "No such file" in missing.errors


def test_a_stopped_check_does_not_wait_for_its_program() -> None:
    """Ctrl-C while torch is imported."""
    run = under_way()
    run.stop()
    begun = SYSTEM.monotonic()
    assert child.ask(["sleep", "600"], run, limit=60).code is None
    assert SYSTEM.monotonic() - begun < 30


def test_a_program_that_floods_is_ended() -> None:
    """Before it fills the disk; what it said is cut."""
    said = child.ask(["yes"], under_way(), limit=60)
    assert said.code is None
    assert len(said.output) == child.MOST
