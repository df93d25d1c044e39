"""A device that computes wrongly on one node of a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.cluster import Cluster, Launch
from chaos.etcd import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "wrong_numbers.py"
STEPS = 6


def quiet_digest(folder: Path) -> str:
    """Train alone, on a device that computes rightly."""
    folder.mkdir()
    subprocess.run([sys.executable, SCRIPT, "nobody", str(STEPS), folder], check=True, timeout=200)
    return (folder / "digest").read_text()


def test_the_node_is_named_and_set_aside_and_no_bit_is_wrong(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """In the very step, before the update: the others go on from the step before, and end as if nothing had been."""
    events = tmp_path / "events"
    launch = Launch(
        run_id="wrong-numbers",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("node1", str(STEPS), str(tmp_path)),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events)},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(3):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(3))
    lines = [json.loads(line) for file in sorted(events.iterdir()) for line in file.read_text().splitlines()]
    lying = [line for line in lines if line["event"] == "node.lying"]
    assert lying, logs
    assert {(tuple(line["nodes"]), line["step"]) for line in lying} == {(("node1",), 3)}, logs
    sealed = {line["number"]: line for line in lines if line["event"] == "generation.sealed"}
    assert [sealed[number]["cause"] for number in sorted(sealed)] == ["start", "lying"], logs
    assert sorted(sealed[max(sealed)]["nodes"]) == ["node0", "node2"]
    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet")
