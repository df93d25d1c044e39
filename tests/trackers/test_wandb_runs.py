"""Weights & Biases offline: with its own client and its own process, as far as that goes without the service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from elastic3d.trackers.wandb_runs import WandbRuns
from tests.trackers.heard import CONFIG, put
one = WandbRuns("project")
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
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


def test_a_curve_goes_on_after_a_restart_and_has_no_step_twice(folder: Path) -> None:
    """Each opening has a folder of its own; together they have each step once, in the order of their making."""
    from wandb.proto import wandb_internal_pb2

    from elastic3d.trackers.wandb_runs import _records

    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [None, [3, 1], [701, 3], None]
    steps = []
    for path in sorted(folder.rglob("*a-run-1.wandb")):
        with open(path, "rb") as file:
            for data in _records(file):
                record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
                if record.WhichOneof("record_type") == "history":
                    steps.append(record.history.step.num)
    assert sorted(steps) == list(range(1, 702))
