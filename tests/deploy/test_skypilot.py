"""The task of SkyPilot: its keys against a list of ours, its command against the real parsers."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import yaml

from elastic3d.cli.agent import LEFT
from tests.deploy.options import started
from tests.paths import ROOT

TASK: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "skypilot" / "node.yaml").read_text())
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"const": 1},
        "workdir": {"type": "string"},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "disk_size": {"type": "integer"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "strategy": {"enum": ["EAGER_NEXT_REGION", "FAILOVER"]},
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                        "recover_on_exit_codes": {"type": "array", "items": {"type": "integer"}},
                    },
                },
            },
        },
        "envs": _TEXTS,
        "file_mounts": _TEXTS,
        "setup": {"type": "string"},
        "run": {"type": "string"},
    },
    "required": ["name", "resources", "run"],
}
"""The fields that are used. SkyPilot's own schema is in a package of forty others; it took this task in version 0.14.1,
and takes anything inside job_recovery."""


def test_the_task_has_known_fields_only() -> None:
    """One managed job is one machine: with more, the loss of one restarts all."""
    jsonschema.validate(TASK, SCHEMA)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda task: task.update(num_nodes=8),
        lambda task: task.update(file_mount={}),
        lambda task: task["resources"].update(spot=True),
        lambda task: task["resources"]["job_recovery"].update(stategy="FAILOVER"),
        lambda task: task["envs"].update(SLOTS=8),
    ],
)
def test_a_mistake_is_refused(mistake: Callable[[dict[str, Any]], None]) -> None:
    """More machines, unknown fields at each depth, and a number where a text belongs."""
    task = copy.deepcopy(TASK)
    mistake(task)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task, SCHEMA)


def test_the_task_takes_the_options_that_it_is_given() -> None:
    """With the variables that SkyPilot sets, and its own; a node that left is started again."""
    line = TASK["run"].replace("\\\n", " ")
    for name, value in {**TASK["envs"], "SKYPILOT_NUM_GPUS_PER_NODE": "8", "HOME": "/root"}.items():
        line = line.replace(f"${name}", value)
    words = shlex.split(line)
    assert words[0] == "exec"  # signals reach the agent
    options = started(words[1:])
    assert options.settings.run_id == TASK["envs"]["RUN_ID"]
    assert options.settings.ca == "/root/etcd-tls/ca.crt"
    assert options.slots == 8
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [LEFT]
