"""A loss that jumps up, in a job of real processes: it goes back, and leaves out the steps that led to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "spike.py"
STEPS, SPIKE, BACK, BATCH = 70, 52, 20, 12
WRONG = ("node.lying", "script.raised", "loss.spiked", "loss.nonfinite")
HOLE = [(SPIKE + 1 - BACK) * BATCH, (SPIKE + 1) * BATCH]


def quiet_digest(folder: Path) -> str:
    """Train alone, with the hole known from the beginning."""
    folder.mkdir()
    environment = os.environ | {"EXCLUDE": json.dumps([HOLE])}
    subprocess.run([sys.executable, SCRIPT, str(STEPS), folder], check=True, timeout=200, env=environment)
    return (folder / "digest").read_text()


@pytest.mark.parametrize(
    "kill",
    [
        "",
        pytest.param(str(SPIKE - BACK // 2), marks=pytest.mark.slow),
        pytest.param(str(SPIKE + 1 - BACK), marks=pytest.mark.slow),
    ],
)
def test_the_run_goes_back_and_leaves_them_out(job_etcd: EtcdServer, tmp_path: Path, kill: str) -> None:
    """A trainer may die on the way there, or among the steps that are left out: the holes stay the same."""
    events, store = tmp_path / "events", tmp_path / "store"
    launch = Launch(
        run_id=f"spike-{kill or 'alone'}",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=(str(STEPS), str(tmp_path)),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events), "STORE": str(store), "KILL": kill},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(2):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    lines = [json.loads(line) for file in sorted(events.glob("*.jsonl")) for line in file.read_text().splitlines()]

    def named(event: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["event"] == event]

    assert set(codes.values()) == {0}, logs
    assert (tmp_path / "killed").exists() == bool(kill), logs
    back = named("run.rolled_back")
    assert [(one["step"], one["samples"]) for one in back] == [(SPIKE, [HOLE])], logs
    assert not [line for line in lines if line["event"] in WRONG], logs
    causes = [line["cause"] for line in sorted(named("generation.sealed"), key=lambda line: line["number"])]
    assert "spike" in causes, logs
    assert (len(set(causes)) > 2) == bool(kill), logs
    assert (tmp_path / "digest").read_text() == quiet_digest(tmp_path / "quiet")
    for arguments in ([str(store)], ["--events", str(events)]):
        proved = CliRunner().invoke(application(), ["samples", "check", *arguments, "--json"])
        assert proved.exit_code == 0, proved.output
        account = json.loads(proved.output)
        assert (account["consumed"], account["excluded"]) == (BATCH * (STEPS - BACK), BATCH * BACK)
    explained = CliRunner().invoke(application(), ["explain", str(back[0]["generation"]), "--events", str(events)])
    for part in ("the loss jumped up", f"positions {HOLE[0]} to {HOLE[1] - 1}", "was formed with 2 nodes"):
        assert part in explained.output, explained.output
