"""State that is lost for good is never silently trained again from the beginning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from elastic3d.etcd import EtcdClient
from elastic3d.membership.records import decode
from elastic3d.values import Generation

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(400), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "bad_input.py"


def launch(etcd: EtcdServer, run: str, most: int, **conf: str) -> Launch:
    """A job of which one node trains, without a store."""
    return Launch(
        run_id=run,
        endpoint=etcd.endpoint,
        script=SCRIPT,
        script_args=("good", "1000000"),
        min_nodes=1,
        max_nodes=most,
        conf={"mode": "resident", "last_call": "0", "orphan": "1", **conf},
    )


def sealed(etcd: EtcdServer, run: str) -> Generation | None:
    """The present generation's record, which says what was reached."""
    key = f"/elastic3d/{run}/board/generation"
    with EtcdClient(etcd.endpoint) as client:
        item = client.get(key)
    return None if item is None else decode(Generation, item.value, key)


def reached(etcd: EtcdServer, run: str) -> bool:
    """Whether a step was made, and held in memory."""
    generation = sealed(etcd, run)
    return generation is not None and generation.reached > 0


def test_a_spare_goes_on_from_the_copy_that_it_has(
    job_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the snapshots of a node that trains alone, and has died."""
    monkeypatch.setenv("ELASTIC3D_LOG", "debug")
    with Cluster(launch(job_etcd, "copied", 2, counts="1", last_call="60"), tmp_path) as cluster:
        cluster.start_node("node0")
        cluster.start_node("node1")
        assert wait_until(lambda: reached(job_etcd, "copied"), 150)
        generation = sealed(job_etcd, "copied")
        assert generation is not None
        (active,), (spare,) = generation.nodes, generation.spares
        log = cluster.node(spare.name).log
        cluster.kill_node(active.name)
        assert wait_until(lambda: "state.restored" in log.read_text(), 100), cluster.tail(spare.name)
        restored = re.search(r"state.restored.* source=(\w+) step=(\d+)", log.read_text())
        assert restored is not None
        assert restored[1] == "memory"
        assert int(restored[2]) >= generation.reached
        assert cluster.running() == [spare.name]


def test_a_spare_that_comes_later_gets_a_copy_too(
    job_etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that trains alone has its snapshots copied to it before long, and it goes on from them."""
    monkeypatch.setenv("ELASTIC3D_LOG", "debug")
    with Cluster(launch(job_etcd, "late", 1), tmp_path) as cluster:
        first = cluster.start_node("node0").log
        assert wait_until(lambda: "generation.sealed" in first.read_text(), 150)
        spare = cluster.start_node("node1").log
        assert wait_until(lambda: "a spare has come" in first.read_text(), 150), cluster.tail("node0")
        copied = re.compile(r"a spare has come.*?snapshot\.held", re.DOTALL)
        assert wait_until(lambda: copied.search(first.read_text()) is not None, 60), cluster.tail("node0")
        cluster.kill_node("node0")
        assert wait_until(lambda: "state.restored" in spare.read_text(), 100), cluster.tail("node1")
        assert re.search(r"state\.restored.* source=memory step=[1-9]", spare.read_text()) is not None


def test_a_spare_does_not_restart_training_lost_with_the_only_node(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Without a store nothing is left, for the spare came only a moment before: it ends the job, and says what was
    lost, and how to restart on purpose."""
    with Cluster(launch(job_etcd, "lost", 1), tmp_path) as cluster:
        first = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in first.log.read_text(), 150)
        assert wait_until(lambda: reached(job_etcd, "lost"), 60)
        spare = cluster.start_node("node1")
        assert wait_until(lambda: "generation.sealed" in spare.log.read_text(), 150)
        cluster.kill_node("node0")
        assert cluster.wait(150) == {"node0": -9, "node1": 1}
        said = spare.log.read_text()
        assert "had been made and was held in memory, and nothing is left of it" in said
        assert "fresh=True" in said
        assert not cluster.leftovers()
