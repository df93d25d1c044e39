"""A device that computes wrongly on one node of a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from checkpointing import open_store, read_latest

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "wrong_numbers.py"
STEPS = 6


def quiet_digest(folder: Path, steps: int = STEPS) -> str:
    """Train alone, on a device that computes rightly."""
    folder.mkdir()
    subprocess.run([sys.executable, SCRIPT, "nobody", str(steps), folder], check=True, timeout=200)
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


AUDITED = (1, 5, 8)
"""Steps that 12.5 % audits of this script's run of three nodes: one in four, and drawn by its seed."""


def test_what_was_made_since_the_last_clean_audit_is_made_again(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """A device goes wrong between two audits: wrong states are in memory and in the store, and none is gone on from."""
    events, steps, wrong_from = tmp_path / "events", 10, 6
    assert AUDITED[1] < wrong_from < AUDITED[2] - 1 < steps
    launch = Launch(
        run_id="gone-wrong-unseen",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("node1", str(steps), str(tmp_path)),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "resident", "last_call": "20"},
        environment={
            "EVENTS": str(events),
            "STORE": str(tmp_path / "store"),
            "WRONG_FROM": str(wrong_from),
            "AUDIT": "12.5%",
        },
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(3):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(3))
    lines = [json.loads(line) for file in sorted(events.iterdir()) for line in file.read_text().splitlines()]
    lying = {(line["step"], line["clean"]) for line in lines if line["event"] == "node.lying"}
    assert lying == {(AUDITED[2], AUDITED[1])}, logs
    assert {line["step"] for line in lines if line["event"] == "state.distrusted"} == {AUDITED[1]}, logs
    last = max(line["generation"] for line in lines if line["event"] == "state.restored")
    restored = {
        (line["step"], bool(line["detail"]))
        for line in lines
        if line["event"] == "state.restored" and line["generation"] == last
    }
    assert len(restored) == 1, logs
    step, warned = restored.pop()
    assert step <= AUDITED[1], logs
    assert warned
    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet", steps)
    ref = read_latest(open_store(str(tmp_path / "store")))
    assert ref is not None
    assert {rule.step for rule in ref.distrusted} == {AUDITED[1]}
    if any(int(name.partition(".")[0]) <= AUDITED[1] for name in ref.committed):
        assert ref.vetted is not None, logs
    assert ref.vetted is None or not ref.distrusts(ref.vetted.checkpoint)


def test_a_newcomer_that_computes_wrongly_makes_no_step(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Its exam comes before the first step of the generation that it joined, and the job goes on without it."""
    events, steps = tmp_path / "events", 120
    launch = Launch(
        run_id="wrong-newcomer",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("node2", str(steps), str(tmp_path)),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "resident", "last_call": "1"},
        environment={
            "EVENTS": str(events),
            "STORE": str(tmp_path / "store"),
            "WRONG_FROM": "0",
            "AUDIT": "100%",
            "SLOW": "0.5",
        },
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        cluster.start_node("node0")
        cluster.start_node("node1")
        wait_until(lambda: any(tmp_path.glob("store/checkpoints/*")), 120)
        cluster.start_node("node2")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(name) for name in ("node0", "node1", "node2"))
    lines = [json.loads(line) for file in sorted(events.iterdir()) for line in file.read_text().splitlines()]
    failed = [line for line in lines if line["event"] == "exam.failed"]
    assert failed, logs
    assert {tuple(line["nodes"]) for line in failed} == {("node2",)}, logs
    joined = {line["number"] for line in lines if line["event"] == "generation.sealed" and "node2" in line["nodes"]}
    made = {line["generation"] for line in lines if line["event"] == "step.committed"}
    assert joined, logs
    assert not joined & made, "no step was made with it"
    assert not [line for line in lines if line["event"] == "state.distrusted"]
    assert {line["event"] for line in lines} >= {"node.lying"}, logs
    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet", steps)


def test_memory_that_loses_bits_is_found_and_no_bit_of_the_run_is_wrong(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """The step is left each time, and the others go on from the one before: with the node, then without it."""
    events = tmp_path / "events"
    launch = Launch(
        run_id="altered",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("node1", str(STEPS), str(tmp_path)),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events), "ALTERED": "2,4"},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(3):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(3))
    files = sorted(file for file in events.iterdir() if file.is_file())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    altered = [line for line in lines if line["event"] == "state.altered"]
    assert [(line["step"], line["nodes"], line["acted"]) for line in altered] == [
        (2, ["node1"], True),
        (4, ["node1"], True),
    ], logs
    # Three copies: the one taken beside, and the snapshot, against the live state.
    assert all("the snapshot has what the copy has" in line["detail"] for line in altered), altered
    sealed = {line["number"]: line for line in lines if line["event"] == "generation.sealed"}
    assert [sealed[number]["cause"] for number in sorted(sealed)] == ["start", "failure", "lying"], logs
    assert [sorted(sealed[number]["nodes"]) for number in sorted(sealed)] == [
        ["node0", "node1", "node2"],
        ["node0", "node1", "node2"],
        ["node0", "node2"],
    ]
    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet")
