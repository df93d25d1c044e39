"""A node is slow for a while: it gets less to compute, and its share again when it is well, between two steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(600), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "slow_node.py"


@pytest.mark.parametrize(
    ("remedy", "shape", "steps"),
    [
        pytest.param("recut", {"STAGES": "2"}, 600, id="blocks"),
        pytest.param("shares", {"STAGES": "1", "ZERO": "2"}, 250, id="shares", marks=pytest.mark.slow),
    ],
)
def test_a_slow_node_gets_less_to_compute_and_its_share_back_and_no_bit_changes(
    job_etcd: EtcdServer, tmp_path: Path, remedy: str, shape: dict[str, str], steps: int
) -> None:
    """Each step is made once, and the end is that of a run of one process to which nothing happened."""
    events = tmp_path / "events"
    launch = Launch(
        run_id="slow-node",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=(str(steps), str(tmp_path)),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident", "last_call": "20", "change_cost": "1"},
        environment={"EVENTS": str(events), **shape},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(2):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(500)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    assert set(codes.values()) == {0}, logs
    lines = [json.loads(line) for file in sorted(events.iterdir()) for line in file.read_text().splitlines()]
    sealed = {line["number"]: line for line in lines if line["event"] == "generation.sealed"}
    assert [sealed[number]["cause"] for number in sorted(sealed)] == ["start", "balance", "balance"], logs
    done = [(line["remedy"], line["nodes"], line["act"]) for line in lines if line["event"] == "layout.rebalanced"]
    assert done == [(remedy, ["node1"], True), ("back", [], True)], logs
    made = [line["step"] for line in lines if line["event"] == "step.committed"]
    assert made == sorted(set(made)), "a step was made twice"
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    subprocess.run([sys.executable, SCRIPT, str(steps), quiet], check=True, timeout=300)
    assert (tmp_path / "digest").read_text() == (quiet / "digest").read_text()
