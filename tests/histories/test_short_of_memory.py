"""Memory runs out in the first layout: the job ends in one that fits, with the bits of a run that had enough."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.faults.catalogue import lacking
from chaos.faults.fault import Need
from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(400)]

Event = dict[str, Any]
SCRIPT = Path(__file__).parent / "scripts" / "short_of_memory.py"
STEPS = 3
ROOM = "280"
"""MiB beside what a trainer has before its first step: more than 220 are needed where all is computed again, more than
330 where what products make is kept."""

GROUP_ROOM = "240"
"""The same beside what all processes of a node hold, of which a control group counts only what was ever touched."""


def lines_of(events: Path) -> list[Event]:
    """Return what all nodes have told."""
    return [json.loads(line) for file in sorted(events.glob("*.jsonl")) for line in file.read_text().splitlines()]


def played(etcd: EtcdServer, folder: Path, room: str, *, group: bool = False) -> list[Event]:
    """Return the events of the job that ended well and with the quiet run's bits. group: the room is its node0's."""
    events = folder / "events"
    launch = Launch(
        run_id=folder.name,
        endpoint=etcd.endpoint,
        script=SCRIPT,
        script_args=(str(STEPS), str(folder)),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events), "ROOM": room},
    )
    with Cluster(launch, folder / "nodes") as cluster:
        for number in range(2):
            node = cluster.start_node(f"node{number}")
            if group and not number:
                (folder / "group").write_text(str(node.group.memory))
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    assert set(codes.values()) == {0}, logs
    lines = lines_of(events)
    sealed = {line["number"]: line for line in lines if line["event"] == "generation.sealed"}
    assert [sealed[number]["cause"] for number in sorted(sealed)] == ["start", "out_of_memory", "out_of_memory"], logs
    short = sorted((line for line in lines if line["event"] == "memory.short"), key=lambda line: line["generation"])
    rungs = [(line["rung"], line["act"], line["generation"]) for line in short]
    assert rungs == [("recompute selective", True, 1), ("recompute full", True, 2)], logs
    assert {line["event"] for line in lines} & {"script.raised", "memory.exhausted"} == {"memory.exhausted"}
    quiet = folder / "quiet"
    quiet.mkdir()
    own = os.environ | {"OMP_NUM_THREADS": "1"}  # as torchrun sets it
    subprocess.run([sys.executable, SCRIPT, str(STEPS), quiet], check=True, timeout=200, env=own)
    assert (folder / "digest").read_text() == (quiet / "digest").read_text()
    return short


@pytest.mark.long
def test_a_job_whose_first_layout_does_not_fit_ends_with_the_same_bits(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """One rung after the other, since less does not help here, and nobody says that the script raised."""
    all_short = played(job_etcd, tmp_path, ROOM)
    raised = [line["error"] for line in lines_of(tmp_path / "events") if line["event"] == "memory.exhausted"]
    asked = {f"{int(nbytes) / 2**20:.1f} MiB asked" for error in raised for nbytes in re.findall(r"(\d+) bytes", error)}
    for short in all_short:
        assert any(f"ran out of the host's memory ({one})" in short["detail"] for one in asked), (short, raised)


@pytest.mark.slow
def test_a_trainer_that_the_kernel_kills_for_its_memory_is_no_kill_by_a_person(
    job_etcd: EtcdServer, tmp_path: Path
) -> None:
    """Its control group counts such kills; its keeper, which has the snapshots, lives on."""
    if why := lacking(Need.GROUP):
        pytest.skip(why)
    for short in played(job_etcd, tmp_path, GROUP_ROOM, group=True):
        assert short["nodes"] == ["node0"]
        assert "the kernel killed it" in short["detail"]
