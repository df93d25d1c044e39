"""Nodes that are drained by an operator, a signal or their cloud: a planned change that repeats no step."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.faults.fault import Fault, node_name
from chaos.faults.moment import When
from chaos.faults.orders import Announce, Drain, Terminate
from chaos.machine.processes import leashed
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from chaos.servers.metadata import Provider
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]


def drained(setting: Setting, fault: Fault, etcd: EtcdServer, quiet: Quiet, workdir: Path) -> str:
    """Assert that the fault took one node out by a planned change without a repeated step; return its name."""
    outcome = held(play(setting, [fault], etcd=etcd, workdir=workdir / "job"), quiet(setting))
    generations = outcome.picture.generations
    assert [view.cause for view in generations] == ["start", "drain"], generations
    assert (generations[1].steps_repeated, generations[1].restored_from) == (0, "memory")
    (gone,) = set(generations[0].nodes) - set(generations[1].nodes)
    return gone


@pytest.mark.slow
@pytest.mark.parametrize("node", ["leader", "node1", "stage0"])
def test_an_operators_drain_repeats_no_step(node: str, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Any node leaves at a step boundary; its torchrun ends with 0, and the others go on from memory."""
    gone = drained(LONG, Drain(node=node, when=When(step=8)), job_etcd, quiet, tmp_path)
    assert node in (gone, "leader", "stage0")


@pytest.mark.slow
def test_a_node_with_two_slots_is_drained(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The snapshots of both slots are safe before the node leaves."""
    setting = dataclasses.replace(LONG, nodes=3, slots=2)
    assert drained(setting, Drain(node="node1", when=When(step=8)), job_etcd, quiet, tmp_path) == "node1"


def test_sigterm_drains_a_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """torchrun passes the signal to its keepers and waits for them, which is time enough to leave in order."""
    assert drained(LONG, Terminate(node="node2", when=When(step=8)), job_etcd, quiet, tmp_path) == "node2"


@pytest.mark.slow
def test_sigterm_to_a_node_with_two_slots_is_one_notice(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Although every keeper of the node gets the signal."""
    setting = dataclasses.replace(LONG, nodes=3, slots=2)
    assert drained(setting, Terminate(node="node1", when=When(step=8)), job_etcd, quiet, tmp_path) == "node1"


@pytest.mark.parametrize(
    "cloud", [Provider.GCP, *(pytest.param(one, marks=pytest.mark.slow) for one in (Provider.AWS, Provider.AZURE))]
)
def test_a_spot_notice_drains_a_node(cloud: Provider, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The cloud announces it over HTTP, half a minute ahead or two."""
    notice = Announce(node="node1", when=When(step=8), cloud=cloud)
    assert drained(LONG, notice, job_etcd, quiet, tmp_path) == "node1"


def test_two_neighbours_can_be_drained_at_once(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A node and its buddy leave together: their snapshots are first moved to nodes that stay."""
    asked = [Drain(node=name, when=When(step=8)) for name in ("node1", "node2")]
    outcome = held(play(LONG, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(LONG))
    last = outcome.picture.generations[-1]
    assert {view.cause for view in outcome.picture.generations[1:]} == {"drain"}
    assert sum(view.steps_repeated for view in outcome.picture.generations) == 0
    assert set(last.nodes) == {"node0", "node3"}


def test_the_only_node_can_be_drained_to_a_spare(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """It has no buddy and leaves before its successor could fetch anything, so it sends its snapshot ahead."""
    setting = dataclasses.replace(LONG, nodes=2, conf={"counts": "1"})
    outcome = play(setting, [Drain(node="stage0", when=When(step=8))], etcd=job_etcd, workdir=tmp_path / "job")
    first, second = held(outcome, quiet(dataclasses.replace(LONG, nodes=1))).picture.generations
    assert (len(first.nodes), len(second.nodes), second.cause) == (1, 1, "drain")
    assert first.nodes != second.nodes
    assert (second.steps_repeated, second.restored_from) == (0, "memory")


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
    """Fifty of fifty drains of 25 s, on a machine that is busy with other work."""
    node = ("leader", "stage0", *map(node_name, range(4)))[seed % 6]
    drained(LONG, Drain(node=node, when=When(step=3 + seed % 11)), job_etcd, quiet, tmp_path)
