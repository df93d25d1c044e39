"""Soaks of real jobs: what elastic3d holds does not grow, a keeper that leaks is found, and Ctrl-C ends it in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from chaos.growth.measures import measures
from chaos.growth.soak import Plan, Soak, SoakSetting, _Soaked, play_soak
from chaos.growth.verdict import SoakVerdict, verdict
from chaos.history.follow import Event, Follower
from chaos.machine.processes import wait_until
from chaos.playing.setting import Setting
from tests.chaos.growth.test_sampling import samples
from tests.chaos.made_up_events import sealed, step

pytestmark = [pytest.mark.etcd, pytest.mark.gloo]

COMMAND = [sys.executable, "-c", "from elastic3d.cli import main; main()", "chaos", "soak"]


LONGER = Path(__file__).parent / "longer.py"
"""A script that would train for hours."""


NAMED = "nobody is named as being at fault to whom nothing was done"
LOST = "a node is taken for dead only where something was done that may end it"


def judged(soak: Soak) -> set[str]:
    """Return the promises that were judged of a soak."""
    return {promise.says for promise in soak.promises if promise.judged}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaking(Plan):
    """A soak of a script whose keepers leak."""

    def setting(self, end: Path) -> Setting:
        """Return the job."""
        setting = Plan.setting(self, end)
        assert isinstance(setting, SoakSetting)
        return replace(setting, script=Path(__file__).parent / "leaking.py")


@pytest.mark.slow
def test_nothing_grows_in_a_short_soak(tmp_path: Path) -> None:
    """With a fault about every ten seconds; the job ends when it is told to, and every promise holds."""
    plan = Plan(seconds=100.0, every=10.0, sample=1.0, nodes=2, words=("kill-trainer", "kill", "join", "etcd-pause"))
    soak = play_soak(plan, workdir=tmp_path, heard=lambda text: None)
    assert soak.broken == ()
    assert soak.stopped == ""
    assert soak.digest
    found = measures(soak.samples)
    assert not [measure.name for measure in found if measure.grows]
    assert verdict(soak, found) is SoakVerdict.PASSED
    assert soak.made, "faults were made"
    assert judged(soak) >= {NAMED, LOST}
    lasting = {measure.name for measure in found if measure.group.name.endswith("lasting processes")}
    assert {"node0 agent", "node0 keeper", "etcd"} <= lasting


@pytest.mark.long
def test_a_keeper_that_leaks_is_found(tmp_path: Path) -> None:
    """Its memory and its descriptors, and nothing of the agents."""
    plan = Leaking(seconds=75.0, every=15.0, sample=1.0, nodes=2, words=("kill-trainer",))
    soak = play_soak(plan, workdir=tmp_path, heard=lambda text: None)
    assert soak.broken == ()
    found = measures(soak.samples)
    grown = {(measure.group.name.split()[0], measure.name) for measure in found if measure.grows}
    assert {("memory", "node0 keeper"), ("descriptors", "node0 keeper"), ("memory", "node1 keeper")} <= grown
    assert not any("agent" in name or "etcd" in name for _, name in grown)
    assert verdict(soak, found) is SoakVerdict.FAILED


@pytest.mark.long
def test_a_script_that_goes_on_for_longer_is_ended_at_its_time(tmp_path: Path) -> None:
    """Its nodes are told to leave, as a scheduler does it, and nothing is asked of an end that it did not come to."""
    plan = Plan(seconds=20.0, every=10.0, sample=1.0, nodes=2, words=("kill-trainer", "join"), script=LONGER)
    soak = play_soak(plan, workdir=tmp_path, heard=lambda text: None)
    assert soak.broken == ()
    assert soak.stopped.startswith("the script had not ended by itself after step ")
    assert soak.steps > 20
    assert soak.seconds < 150
    # What nodes say of each other as all of them leave is no alarm.
    assert judged(soak) >= {NAMED, LOST}


@pytest.mark.slow
def test_nodes_that_do_not_leave_are_named(tmp_path: Path) -> None:
    """Where they have no time to: the soak ends, says so, and leaves none of them behind."""
    plan = Plan(seconds=5.0, sample=1.0, nodes=2, words=("kill-trainer",), script=LONGER, leave=0.0)
    soak = play_soak(plan, workdir=tmp_path, heard=lambda text: None)
    assert any("still run 0 s after the script's time was over" in one for one in soak.broken), soak.broken


@pytest.mark.parametrize("ended", [SystemExit(130), RuntimeError("no leftovers")])
def test_what_ends_it_after_the_job_loses_nothing(
    ended: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C or an error while leftovers are waited for: all samples are told."""
    taken, settled = samples(0.0), list[int]()

    def run(player: _Soaked) -> str:
        player.samples += taken
        return ""

    def leftovers(player: _Soaked) -> NoReturn:
        raise ended

    # Of a job that has ended.
    monkeypatch.setattr(_Soaked, "run", run)
    monkeypatch.setattr(_Soaked, "leftovers", leftovers)
    plan = Plan(seconds=100.0)
    soak = play_soak(plan, workdir=tmp_path, heard=lambda text: None, settled=lambda: settled.append(1))
    assert soak.samples == tuple(taken)
    assert settled == [1]
    if isinstance(ended, SystemExit):
        assert (soak.interrupted, soak.stopped, soak.error) == (signal.SIGINT, "interrupted", "")
    else:
        assert (soak.interrupted, soak.error) == (0, "RuntimeError: no leftovers")


def test_a_port_that_somebody_was_left_counts_as_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in any other run. Here the process that has it outlives its node, which is made up."""
    events = [[sealed(1, 1.0, "start", ["node0"]), *(step(number, 1.0 + number, 1) for number in (1, 2))]]
    node = SimpleNamespace(name="node0", alive=True, killed=True, dismissed=False, unwanted=False, temp=tmp_path)
    node.process = SimpleNamespace(returncode=-9, poll=lambda: -9, kill=lambda: None, wait=lambda: None)
    node.processes = lambda part=None: [] if part else [os.getpid()]
    node.reader = node.group = None

    def poll(follower: object) -> list[Event]:
        node.alive = bool(events)
        return events.pop() if events else []

    monkeypatch.setattr(Follower, "poll", poll)
    monkeypatch.setattr(_Soaked, "start", lambda player, name: player.cluster._nodes.update({name: node}))
    monkeypatch.setattr(_Soaked, "_clean", lambda player: None)
    plan = Plan(seconds=100.0, nodes=1, words=("kill-trainer",), script=LONGER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        soak = play_soak(plan, workdir=tmp_path / "soak", heard=lambda text: None)
        left = f"left behind: port {server.getsockname()[1]} of 127.0.0.1, on which node0 listened"
    assert any(left in one for one in soak.broken), soak.broken


@pytest.fixture
def heard() -> Iterator[None]:
    """Have SIGHUP end a process, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.long
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_end_it_and_it_reports(number: signal.Signals, tmp_path: Path) -> None:
    """What was measured up to then is kept; processes are not. The whole foreground group gets the signal."""
    out = tmp_path / "out"
    with subprocess.Popen(
        [*COMMAND, "--hours=1", "--nodes=2", f"--out={out}", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    ) as process:
        events = "elastic3d-soak-*/job/events/*.jsonl"
        # A sample is taken at the first step.
        steps = b"step.committed"
        assert wait_until(lambda: sum(path.read_bytes().count(steps) for path in tmp_path.glob(events)) > 10, 120)
        os.killpg(process.pid, number)
        printed, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    document = json.loads(printed)
    assert document["interrupted"] == number
    assert (out / "soak-7" / "samples.jsonl").read_text()
    assert (out / "soak-7" / "report.html").exists()
    assert not list(tmp_path.glob("elastic3d-*"))
