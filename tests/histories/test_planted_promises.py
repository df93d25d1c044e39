"""A promise that is broken on purpose is missed by no judge: drawn schedules find it, and are made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.histories.test_random_storms import Chaos, chaos, drawn

__all__ = ["chaos"]

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(1200)]

PLANTED = Path(__file__).parent / "scripts" / "planted.py"
RUNS = 2
"""Within so many runs each is found."""
NODES = "kill,kill-trainer,join,drain,etcd-compact,revoke"
OUTAGES = "join,etcd-pause,etcd-restart"


@pytest.mark.parametrize(
    ("planted", "faults", "promise"),
    [
        ("noise", NODES, "whatever happens, the bits are those of a run that nothing happens to"),
        ("early", NODES, "the job makes all its steps"),
        ("raises", NODES, "nothing that happens makes the script raise"),
        ("stands", NODES, "the job never stands still for good"),
        ("exits", "join,drain,etcd-compact,revoke", "a node that nobody kills ends well"),
        ("damage", NODES, "every checkpoint that was committed can be restored"),
        ("alarm", OUTAGES, "nobody is named as being at fault to whom nothing was done"),
        ("left", OUTAGES, "nothing is left behind"),
    ],
)
def test_a_promise_broken_on_purpose_is_found_and_its_schedule_made_small(
    planted: str, faults: str, promise: str, chaos: Chaos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four faults at most three are left. What is broken may bring other promises down, too."""
    monkeypatch.setenv("PLANTED", planted)
    options = ["--seed=3", f"--runs={RUNS}", "--each=4", "--nodes=3", f"--faults={faults}"]
    code, document = drawn(chaos, PLANTED, options, steps=24, every=5)
    assert code == 1, document
    failed = next(run for run in document["runs"] if run["broken"])
    verdict = json.loads(Path(failed["folder"], "verdict.json").read_text())
    assert promise in {one["says"] for one in verdict["promises"] if one["broken"]}, verdict
    code, shrunk = chaos("shrink", failed["folder"], "--tries=8")
    assert code == 0, shrunk
    assert len(shrunk["faults"]) <= 3, shrunk
