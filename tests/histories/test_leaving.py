"""Nodes, one or all, whose processes are ended or stopped by signals."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from chaos.faults.fault import node_name
from chaos.faults.moment import When
from chaos.faults.orders import Terminate
from chaos.faults.process import Continue, Flap, Stop
from chaos.history.follow import Picture
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import send, wait_until
from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, SMALL, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "bad_input.py"


class Times:
    """When the first node was told to leave, and when the last one had ended."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.signalled: float | None = None
        self.ended: float | None = None

    def __call__(self, picture: Picture) -> None:
        if self.signalled is None and any(text.startswith("chaos: sigterm") for _, text in picture.news):
            self.signalled = SYSTEM.monotonic()
        if self.ended is None and len(picture.ended) == self._nodes:
            self.ended = SYSTEM.monotonic()


def test_sigterm_to_all_nodes_stops_the_job_cleanly(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """All leave within seconds, long before torchrun would kill them, and the trained state is in the store."""
    setting = dataclasses.replace(SMALL, steps=2000)
    asked = [Terminate(node=node_name(number), when=When(step=9)) for number in range(4)]
    times = Times(4)
    outcome = play(setting, asked, etcd=job_etcd, workdir=tmp_path / "job", watch=times)
    logs = "\n".join(outcome.logs.values())
    assert not outcome.failure, (outcome.failure, logs)
    assert set(outcome.exit_codes.values()) == {1}, "torchrun's own code after SIGTERM"
    assert "every node was told to leave" in logs
    assert times.signalled is not None
    assert times.ended is not None
    assert times.ended - times.signalled < 28, logs
    picture = outcome.picture
    assert [view.cause for view in picture.generations] == ["start"]
    assert 9 <= picture.step < 2000
    assert not picture.conflicts
    assert picture.checkpoints[-1] == picture.step, logs
    assert outcome.leftovers == ()


def test_a_job_stopped_by_sigterm_resumes_from_the_store(job_etcd: EtcdServer, tmp_path: Path) -> None:
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
        assert wait_until(lambda: events.exists() and "state.restored" in events.read_text(), 150), node.log.read_text()
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
def test_a_killed_keeper_ends_its_sibling_at_once(slot: int, job_etcd: EtcdServer, tmp_path: Path) -> None:
    """torchrun sends the sibling SIGTERM, which is no notice here: the node has nothing left to save."""
    with Cluster(launch(job_etcd, f"sibling-{slot}", 2), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150), node.log.read_text()
        began = SYSTEM.monotonic()
        send([node.keepers()[slot]], signal.SIGKILL)
        assert cluster.wait(25) == {"node0": 1}, node.log.read_text()
        # Not before a drain's 25 s, nor torchrun's 30.
        assert SYSTEM.monotonic() - began < 20
        assert not cluster.leftovers()


@pytest.mark.slow
def test_a_stopped_keeper_ends_its_node(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Its sibling misses its answers, kills it and leaves too: the others would wait for its snapshots for ever."""
    with Cluster(launch(job_etcd, "stopped-sibling", 2), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150), node.log.read_text()
        second = next(pid for pid in node.keepers() if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        send([second], signal.SIGSTOP)
        assert cluster.wait(60) == {"node0": 1}, node.log.read_text()
        assert "its keeper has not answered" in node.log.read_text()
        assert not cluster.leftovers()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_second_signal_ends_a_node_at_once(number: signal.Signals, job_etcd: EtcdServer, tmp_path: Path) -> None:
    """As a person expects of a second Ctrl-C."""
    with Cluster(launch(job_etcd, f"twice-{number}", 1), tmp_path) as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150), node.log.read_text()
        cluster.terminate_node("node0", number)
        assert wait_until(lambda: "node.draining" in node.log.read_text(), 20), node.log.read_text()
        cluster.terminate_node("node0", number)
        assert cluster.wait(20) == {"node0": 1}, node.log.read_text()
        assert not cluster.leftovers()


def test_a_stopped_node_is_evicted_and_rejoins(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Nobody waits for it; once it resumes it learns that it is out, kills its trainers and joins as a newcomer."""
    asked = [Stop(node="node1", when=When(step=8)), Continue(node="node1", when=When(step=12))]
    outcome = held(play(LONG, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    generations = outcome.picture.generations
    assert [view.cause for view in generations[:2]] == ["start", "death"], generations
    assert "node1" not in generations[1].nodes
    assert "node1" in generations[-1].nodes
    assert "member.fenced" in (tmp_path / "job" / "events" / "node1-0.jsonl").read_text()


@pytest.mark.slow
def test_a_job_ends_without_a_stopped_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The others end the job without it."""
    outcome = held(
        play(SMALL, [Stop(node="node1", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL)
    )
    assert outcome.killed == ("node1",)


@pytest.mark.slow
def test_a_restarted_node_rejoins(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Under its old name it is another incarnation, and a newcomer."""
    setting = dataclasses.replace(SMALL, steps=160, options=("--checkpoint-every=5", "--pause=0.15"))
    outcome = held(
        play(setting, [Flap(node="node1", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job"), quiet(setting)
    )
    generations = outcome.picture.generations
    assert [view.cause for view in generations[:2]] == ["start", "death"], generations
    assert "node1" in generations[-1].nodes
