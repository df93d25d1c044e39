"""Samples that bring numbers which are not finite, in a job of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "bad_samples.py"
STEPS = 6


def quiet_digest(folder: Path, exclude: list[list[int]]) -> str:
    """Train alone, with the holes known from the beginning."""
    folder.mkdir()
    environment = os.environ | {"EXCLUDE": json.dumps(exclude)}
    subprocess.run([sys.executable, SCRIPT, str(STEPS), folder], check=True, timeout=200, env=environment)
    return (folder / "digest").read_text()


@pytest.mark.parametrize("layout", ["pp=1", pytest.param("pp=2", marks=pytest.mark.slow)])
def test_they_are_left_out_and_nothing_else(job_etcd: EtcdServer, tmp_path: Path, layout: str) -> None:
    """A trainer dies in the middle of a step that is made again: the next generation comes to the same holes."""
    events, store = tmp_path / "events", tmp_path / "store"
    launch = Launch(
        run_id=f"bad-samples-{layout[-1]}",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=(str(STEPS), str(tmp_path)),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events), "STORE": str(store), "LAYOUT": layout, "KILL": "1"},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(2):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    lines = [json.loads(line) for file in sorted(events.glob("*.jsonl")) for line in file.read_text().splitlines()]
    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "killed").exists(), logs
    assert len({line["number"] for line in lines if line["event"] == "generation.sealed"}) > 1, logs
    excluded = {line["step"]: line["samples"] for line in lines if line["event"] == "batch.excluded"}
    holes = [part for step in sorted(excluded) for part in excluded[step]]
    assert len(holes) >= 2, logs
    assert not [line for line in lines if line["event"] in ("node.lying", "audit.failed", "script.raised")], logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet", holes)
    explained = CliRunner().invoke(application(), ["explain", "--events", str(events)])
    for part in ("samples whose numbers are not finite", "left out in all:", f"{holes[0][0]} to "):
        assert part in explained.output, explained.output
    for arguments in ([str(store)], ["--events", str(events)]):
        proved = CliRunner().invoke(application(), ["samples", "check", *arguments, "--json"])
        assert proved.exit_code == 0, proved.output
        account = json.loads(proved.output)
        number = sum(stop - first for first, stop in holes)
        assert (account["consumed"], account["excluded"]) == (12 * STEPS - number, number)
