"""Weights & Biases offline: with its own client and its own process, as far as that goes without the service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, time
from pathlib import Path
from wandb.proto import wandb_internal_pb2
from elastic3d.trackers.wandb_runs import WandbRuns, _records
from tests.trackers.heard import CONFIG, put
one = WandbRuns("project")
time.sleep(1.0 - time.time() % 1.0)  # folders are named by the second: the first openings share one
said = [one.open("a run/1", CONFIG)]
put(one, 1, 3)
one.close()
one = WandbRuns("project")
said.append(one.open("a run/1", CONFIG))
put(one, 3, 700, generation=2)
assert not one.rewind(5)
put(one, 600, 701, generation=3)
one.close()
said.append(one.open("a run/1", CONFIG))
one.close()
said.append(one.open("another", CONFIG))
one.close()
read, steps = wandb_internal_pb2.Record.FromString, []
for path in Path(sys.argv[1]).rglob("*a-run-1.wandb"):
    with open(path, "rb") as file:
        records = [read(data) for data in _records(file)]
    steps += [one.history.step.num for one in records if one.WhichOneof("record_type") == "history"]
print(json.dumps([said, sorted(steps)]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


def test_a_curve_goes_on_after_a_restart_and_has_no_step_twice(folder: Path) -> None:
    """Each opening has a folder of its own; together they have each step once, in the order of their making."""
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said, steps = json.loads(result.stdout.splitlines()[-1])
    assert said == [None, [3, 1], [701, 3], None]
    assert steps == list(range(1, 702))
