"""State that is lost for good is never silently trained again from the beginning."""

from __future__ import annotations

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


def test_a_spare_does_not_restart_training_lost_with_the_only_node(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Without a store nothing is left: the spare ends the job, says what was lost, and how to restart on purpose."""
    launch = Launch(
        run_id="lost",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("good", "1000000"),
        min_nodes=1,
        max_nodes=1,
        conf={"mode": "resident", "last_call": "0", "orphan": "1"},
    )
    key = "/elastic3d/lost/board/generation"

    def reached() -> bool:
        with EtcdClient(job_etcd.endpoint) as client:
            item = client.get(key)
        return item is not None and decode(Generation, item.value, key).reached > 0

    with Cluster(launch, tmp_path) as cluster:
        first = cluster.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in first.log.read_text(), 150)
        spare = cluster.start_node("node1")
        assert wait_until(lambda: "generation.sealed" in spare.log.read_text(), 150)
        assert wait_until(reached, 60)
        cluster.kill_node("node0")
        assert cluster.wait(150) == {"node0": -9, "node1": 1}
        said = spare.log.read_text()
        assert "had been made and was held in memory, and nothing is left of it" in said
        assert "fresh=True" in said
        assert not cluster.leftovers()
