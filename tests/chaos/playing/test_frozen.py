"""What is stopped for good stays stopped, whatever else is done to it; and nothing is done to a node that waits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from chaos.faults import process
from chaos.faults.fault import OfNode
from chaos.faults.frozen import FreezeAgent
from chaos.faults.moment import When
from chaos.faults.process import Continue, Freeze, Kill, Pause, Stop
from chaos.history.follow import Picture
from chaos.machine.cluster import AgentNode
from chaos.machine.processes import Part

WHEN = When(step=1)
TRAINERS = [11, 12]


class Agent:
    """The process of an agent that runs."""

    pid, returncode = 10, None

    def poll(self) -> None:
        """It runs."""


class Job:
    """A job of one node of which the signals are kept."""

    picture = Picture()

    def __init__(self, gate: Path | None = None) -> None:
        given: dict[str, Any] = {"name": "node0", "process": Agent(), "log": Path(), "temp": Path(), "group": None}
        self.one = AgentNode(**given, gate=gate)
        self.cluster = self
        self.due: list[Callable[[], object]] = []
        self.noted: list[tuple[str, str]] = []

    def node(self, name: str) -> AgentNode:
        return {"node0": self.one}[name]

    def kill_node(self, name: str) -> None:
        self.one.killed = True

    def stop_node(self, name: str) -> None:
        self.one.stopped = True

    def wake_node(self, name: str) -> None:
        self.one.stopped = False

    def note(self, kind: str, node: str = "") -> None:
        self.noted.append((kind, node))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self.due.append(action)

    def make(self, fault: OfNode) -> bool:
        return fault.make(cast(Any, self))


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the pids that are stopped, by the signals that faults have sent."""
    asleep: set[int] = set()

    def send(pids: list[int], number: signal.Signals) -> None:
        {signal.SIGSTOP: asleep.update, signal.SIGCONT: asleep.difference_update}[number](pids)

    monkeypatch.setattr(process, "send", send)
    monkeypatch.setattr("chaos.faults.frozen.send", send)
    monkeypatch.setattr(AgentNode, "processes", lambda self, part: TRAINERS if part is Part.TRAINERS else [])
    return asleep


@pytest.mark.parametrize("first", [Freeze, Pause])
def test_a_pause_wakes_nobody_who_was_stopped_for_good(first: type[OfNode], stopped: set[int]) -> None:
    """Before it, or meanwhile."""
    job, freeze, pause = Job(), Freeze(node="node0", when=WHEN), Pause(node="node0", when=WHEN)
    for fault in (freeze, pause) if first is Freeze else (pause, freeze):
        assert job.make(fault)
    assert stopped == {*TRAINERS}
    job.due.pop()()
    assert stopped == {TRAINERS[0]}


def test_a_pause_ends_whatever_else_of_the_node_is_stopped_for_good(stopped: set[int]) -> None:
    """Its agent, say."""
    job = Job()
    assert job.make(Pause(node="node0", when=WHEN))
    assert job.make(FreezeAgent(node="node0", when=WHEN))
    job.due.pop()()
    assert stopped == {Agent.pid}


def test_nothing_is_done_to_a_node_that_has_not_come_yet(tmp_path: Path) -> None:
    """It waits at its gate, or is not started: its moment comes later."""
    kill = Kill(node="node0", when=WHEN)
    waiting = Job(gate=tmp_path / "gate")
    assert not waiting.make(kill)
    assert not Job().make(Kill(node="node7", when=WHEN))
    (tmp_path / "gate").touch()
    assert waiting.make(kill)


def test_a_node_that_is_not_stopped_is_not_woken() -> None:
    """Whoever stops it may come later: it would sleep on, though what wakes it was said to be done."""
    job, stop, wake = Job(), Stop(node="node0", when=WHEN), Continue(node="node0", when=WHEN)
    assert not job.make(wake)
    assert job.noted == []
    assert job.make(stop)
    assert job.make(wake)
    assert job.noted == [("stop", "node0"), ("cont", "node0")]
    assert not job.one.stopped
