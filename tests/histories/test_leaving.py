"""Nodes that are told to leave, and nodes that fall silent: real signals, a real metadata server, a real etcd."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.cluster import Cluster, Launch
from chaos.etcd import EtcdServer
from chaos.follow import Picture
from chaos.play import Setting, play
from chaos.processes import leashed, send, wait_until
from chaos.scenario import Announce, Continue, Drain, Fault, Flap, Stop, Terminate, When, node_name
from elastic3d.clock import SYSTEM
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, SMALL, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "bad_input.py"


def drained(setting: Setting, fault: Fault, etcd: EtcdServer, quiet: Quiet, workdir: Path) -> str:
    """Assert that the fault took one node out by a planned change without a repeated step; return its name."""
    outcome = held(play(setting, [fault], etcd=etcd, workdir=workdir / "job"), quiet(setting))
    generations = outcome.picture.generations
    assert [view.cause for view in generations] == ["start", "drain"], generations
    assert (generations[1].steps_repeated, generations[1].restored_from) == (0, "memory")
    (gone,) = set(generations[0].nodes) - set(generations[1].nodes)
    return gone


@pytest.mark.parametrize("node", ["leader", *(pytest.param(n, marks=pytest.mark.slow) for n in ("node1", "stage0"))])
def test_an_operators_drain_repeats_no_step(node: str, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Whoever it is, the node leaves at a step boundary; its torchrun ends with 0, and the others go on from memory."""
    gone = drained(LONG, Drain(node=node, when=When(step=8)), job_etcd, quiet, tmp_path)
    assert node in (gone, "leader", "stage0")


@pytest.mark.slow
def test_a_drain_of_a_node_with_two_slots(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """What both slots hold is safe before the node leaves."""
    setting = dataclasses.replace(LONG, nodes=3, slots=2)
    assert drained(setting, Drain(node="node1", when=When(step=8)), job_etcd, quiet, tmp_path) == "node1"


def test_sigterm_drains_the_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """torchrun passes the signal to its keepers and waits for them: that is time enough to leave in order."""
    assert drained(LONG, Terminate(node="node2", when=When(step=8)), job_etcd, quiet, tmp_path) == "node2"


@pytest.mark.slow
def test_sigterm_to_a_node_with_two_slots_is_one_notice(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Every keeper of the node gets the signal."""
    setting = dataclasses.replace(LONG, nodes=3, slots=2)
    assert drained(setting, Terminate(node="node1", when=When(step=8)), job_etcd, quiet, tmp_path) == "node1"


def test_a_spot_notice_drains_the_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The cloud says it over HTTP, half a minute ahead."""
    assert drained(LONG, Announce(node="node1", when=When(step=8)), job_etcd, quiet, tmp_path) == "node1"


def test_two_neighbours_drained_at_once(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A node and its buddy leave together: what they hold is with somebody who stays."""
    asked = [Drain(node=name, when=When(step=8)) for name in ("node1", "node2")]
    outcome = held(play(LONG, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    last = outcome.picture.generations[-1]
    assert {view.cause for view in outcome.picture.generations[1:]} == {"drain"}
    assert sum(view.steps_repeated for view in outcome.picture.generations) == 0
    assert set(last.nodes) == {"node0", "node3"}


def test_the_only_node_drained_to_a_spare(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """It has no buddy, and is gone before its successor could fetch anything: what it holds goes there before it."""
    setting = dataclasses.replace(LONG, nodes=2, conf={"counts": "1"})
    outcome = play(setting, [Drain(node="leader", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job")
    first, second = held(outcome, quiet(dataclasses.replace(LONG, nodes=1))).picture.generations
    assert (len(first.nodes), len(second.nodes), second.cause) == (1, 1, "drain")
    assert first.nodes != second.nodes
    assert (second.steps_repeated, second.restored_from) == (0, "memory")


class Times:
    """When the first node was told to leave, and when the last one had ended."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.told: float | None = None
        self.ended: float | None = None

    def __call__(self, picture: Picture) -> None:
        if self.told is None and any(text.startswith("chaos: sigterm") for _, text in picture.news):
            self.told = SYSTEM.monotonic()
        if self.ended is None and len(picture.ended) == self._nodes:
            self.ended = SYSTEM.monotonic()


def test_sigterm_to_everybody_stops_the_job_well(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """All leave within seconds, long before torchrun would kill them; what was trained is in the store."""
    setting = dataclasses.replace(SMALL, steps=2000)
    asked = [Terminate(node=node_name(number), when=When(step=9)) for number in range(4)]
    times = Times(4)
    outcome = play(setting, asked, etcd=job_etcd, workdir=tmp_path / "job", watch=times)
    logs = "\n".join(outcome.logs.values())
    assert not outcome.failure, (outcome.failure, logs)
    assert set(outcome.exit_codes.values()) == {1}, "torchrun's own code after SIGTERM"
    assert "every node was told to leave" in logs
    assert times.told is not None
    assert times.ended is not None
    assert times.ended - times.told < 28, logs
    picture = outcome.picture
    assert [view.cause for view in picture.generations] == ["start"]
    assert 9 <= picture.step < 2000
    assert not picture.conflicts
    assert picture.checkpoints[-1] == picture.step, logs
    assert outcome.leftovers == ()


def test_a_job_stopped_by_sigterm_goes_on_from_the_store(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Started again under another id on the same store, it makes the very next step."""
    setting = dataclasses.replace(SMALL, nodes=2, steps=2000, store=(tmp_path / "store").as_uri())
    asked = [Terminate(node=node_name(number), when=When(step=9)) for number in range(2)]
    first = play(setting, asked, etcd=job_etcd, workdir=tmp_path / "first")
    assert not first.failure, first.logs
    (folder,) = (tmp_path / "store").iterdir()
    again = Launch(
        run_id="again",
        endpoint=job_etcd.endpoint,
        script=setting.script,
        script_args=setting.arguments(store=folder.as_uri(), events=tmp_path / "events", out=tmp_path),
        conf={"mode": "resident", "last_call": "0"},
    )
    with Cluster(again, tmp_path / "again") as cluster:
        node = cluster.start_node("node0")
        events = tmp_path / "events" / "node0-0.jsonl"
        assert wait_until(lambda: events.exists() and "state.restored" in events.read_text(), 60), node.log.read_text()
        assert f'"source":"store","step":{first.picture.step}' in events.read_text()


def launch(etcd: EtcdServer, name: str, slots: int) -> Launch:
    return Launch(
        run_id=name,
        endpoint=etcd.endpoint,
        script=SCRIPT,
        script_args=("good", "1000000"),
        slots=slots,
        conf={"mode": "resident", "last_call": "0"},
    )


@pytest.mark.parametrize("slot", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_keeper_killed_takes_its_sibling_along_at_once(slot: int, job_etcd: EtcdServer, tmp_path: Path) -> None:
    """torchrun sends the sibling SIGTERM, which is no notice: nothing of the node is to be saved any more."""
    with Cluster(launch(job_etcd, f"sibling-{slot}", 2), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 60), node.log.read_text()
        began = SYSTEM.monotonic()
        send([node.keepers()[slot]], signal.SIGKILL)
        assert cluster.wait(25) == {"node0": 1}, node.log.read_text()
        # Not before a drain's 25 s, nor torchrun's 30.
        assert SYSTEM.monotonic() - began < 20
        assert not cluster.leftovers()


@pytest.mark.slow
def test_a_keeper_stopped_ends_its_node(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Its sibling misses its answers, kills it and leaves with it: the others would wait for its snapshots for ever."""
    with Cluster(launch(job_etcd, "stopped-sibling", 2), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 60), node.log.read_text()
        second = next(pid for pid in node.keepers() if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        send([second], signal.SIGSTOP)
        assert cluster.wait(60) == {"node0": 1}, node.log.read_text()
        assert "its keeper has not answered" in node.log.read_text()
        assert not cluster.leftovers()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_second_signal_ends_the_node_at_once(number: signal.Signals, job_etcd: EtcdServer, tmp_path: Path) -> None:
    """As a person expects of a second Ctrl-C."""
    with Cluster(launch(job_etcd, f"twice-{number}", 1), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 60), node.log.read_text()
        cluster.terminate_node("node0", number)
        assert wait_until(lambda: "node.draining" in node.log.read_text(), 20), node.log.read_text()
        cluster.terminate_node("node0", number)
        assert cluster.wait(20) == {"node0": 1}, node.log.read_text()
        assert not cluster.leftovers()


def test_a_stopped_node_is_left_behind_and_comes_back(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Nobody waits for it; when it wakes it finds itself out, kills its trainers and joins as a newcomer."""
    asked = [Stop(node="node1", when=When(step=8)), Continue(node="node1", when=When(step=12))]
    outcome = held(play(LONG, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    generations = outcome.picture.generations
    assert [view.cause for view in generations[:2]] == ["start", "death"], generations
    assert "node1" not in generations[1].nodes
    assert "node1" in generations[-1].nodes
    assert "member.fenced" in (tmp_path / "job" / "events" / "node1-0.jsonl").read_text()


@pytest.mark.slow
def test_a_stopped_node_that_never_wakes(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The others end the job without it."""
    outcome = held(
        play(SMALL, [Stop(node="node1", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL)
    )
    assert outcome.killed == ("node1",)


@pytest.mark.slow
def test_a_node_that_is_started_again_takes_part_again(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Under its old name it is another incarnation, and a newcomer."""
    setting = dataclasses.replace(SMALL, steps=600)
    outcome = held(
        play(setting, [Flap(node="node1", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job"), quiet(setting)
    )
    generations = outcome.picture.generations
    assert [view.cause for view in generations[:2]] == ["start", "death"], generations
    assert "node1" in generations[-1].nodes


@pytest.fixture
def load() -> Iterator[None]:
    """Keep the machine busy meanwhile: two processes for each of its cores."""
    command = leashed([sys.executable, "-c", "while True: pass"])
    busy = [subprocess.Popen(command) for _ in range(4)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("seed", range(50))
def test_no_drain_repeats_a_step_under_load(seed: int, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Fifty of fifty drains of 25 s, on a machine that has other things to do."""
    node = ("leader", "stage0", *map(node_name, range(4)))[seed % 6]
    drained(LONG, Drain(node=node, when=When(step=3 + seed % 11)), job_etcd, quiet, tmp_path)
