"""Numbers that a script logs and evaluates, and the end of a run that it asks for, in a job of real processes."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer
from checkpointing import open_checkpoint, open_store
from tests.trackers.test_event_files import shown

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "logging_and_stopping.py"
STEPS, STOP_AT, EVERY = 12, 8, 3


def played(etcd: EtcdServer, folder: Path, name: str, environment: Mapping[str, str], stop_at: int) -> list[Any]:
    """Run the job on two nodes; return the lines of its events. All jobs have one store and write one curve."""
    events = folder / name
    launch = Launch(
        run_id="logging",
        endpoint=etcd.endpoint,
        script=SCRIPT,
        script_args=(str(STEPS), str(stop_at), str(folder)),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident", "last_call": "20"},
        environment={"EVENTS": str(events), "STORE": str(folder / "store"), **environment},
    )
    with Cluster(launch, folder / f"nodes-{name}") as cluster:
        for number in range(2):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(300)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    assert set(codes.values()) == {0}, logs
    return [json.loads(line) for file in sorted(events.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_what_is_logged_is_there_once_and_a_run_ends_where_its_script_says(
    job_etcd: EtcdServer, tmp_path: Path
) -> None:
    """Trainers die when a step is logged, in an evaluation, and when one rank has ended the run of both.

    What they did is made again. The job's last state is a checkpoint; the same job, started again, makes no step, until
    its script accepts the stop.
    """
    lines = played(job_etcd, tmp_path, "first", {"KILL": "logged evaluating stopped"}, STOP_AT)
    assert len(list(tmp_path.glob("killed-*"))) == 3
    assert len({line["number"] for line in lines if line["event"] == "generation.sealed"}) > 3
    assert_whole(tmp_path, lines, STOP_AT)
    # Once more where its step was made again.
    ended = {(line["step"], line["detail"]) for line in lines if line["event"] == "run.stopped"}
    assert ended == {(STOP_AT, "it is good enough")}
    (place,) = (tmp_path / "store").rglob("checkpoints")
    saved = open_checkpoint(open_store(str(place.parent), write=False))
    assert saved.step == STOP_AT
    again = played(job_etcd, tmp_path, "again", {}, STOP_AT)
    assert [line for line in again if line["event"] == "step.committed"] == []
    (detail,) = {line["detail"] for line in again if line["event"] == "state.restored" and line["rank"] == 0}
    assert f"the script had stopped the run after step {STOP_AT}: it is good enough" in detail
    more = played(job_etcd, tmp_path, "more", {"ACCEPT": "stop"}, 0)
    assert {line["step"] for line in more if line["event"] == "step.committed"} == set(range(STOP_AT + 1, STEPS + 1))
    assert_whole(tmp_path, [*lines, *more], STEPS)


def assert_whole(folder: Path, lines: list[Any], steps: int) -> None:
    """Assert that each step is once in every tracker, with what was logged of it, and so in the events."""
    wanted = [(n + 1, float(n**2), n / 3, n + 0.5) for n in range(steps)]
    with open(folder / "curves.csv") as file:
        rows = list(csv.DictReader(file))
    names = ("square", "third", "alone")
    assert [(int(row["step"]), *(float(row[name]) for name in names)) for row in rows] == wanted
    points = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
    assert [(point["step"], *(point[name] for name in names)) for point in points] == wanted
    evaluated = {point["step"]: point["eval/square"] for point in points if "eval/square" in point}
    assert list(evaluated) == list(range(1, steps + 1, EVERY))
    assert len(set(evaluated.values())) == len(evaluated)
    assert shown(folder / "board", "third") == pytest.approx({step: third for step, _, third, _ in wanted})
    made = {line["step"]: line["logged"] for line in lines if line["event"] == "step.committed"}
    assert [(step, *(made[step][name] for name in names)) for step in sorted(made)] == wanted
