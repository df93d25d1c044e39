"""What made a state is the same on all ranks, whichever of them knows it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from elastic3d.provenance import record
from elastic3d.provenance.record import ScriptOrigin
from elastic3d.values import Layout
from tests.parallel import mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(300)]


def world(folder: Path, one: Any, other: Any) -> list[Report]:
    """Make two steps on two ranks whose scripts were given these configurations, and leave."""
    origins = {0: ScriptOrigin(config=one), 1: ScriptOrigin(config=other)}
    leaving = dict.fromkeys(range(2), 1)
    return run_world(mains.train, Orders(layout=Layout(pp=1, dp=2), keep=folder, leave_at=leaving, origins=origins))


def test_all_ranks_say_the_same(tmp_path: Path) -> None:
    """What rank 0 knows: facts that differed could not be committed."""
    assert [report.error for report in world(tmp_path, {"lr": 0.5}, {"lr": 0.5})] == ["2", "2"]
    facts = [pickle.loads(file.read_bytes())[0] for file in sorted(tmp_path.iterdir())]
    assert len(facts) == 2
    assert facts[0] == facts[1]
    made = record.of_facts(facts[1])
    assert made is not None
    assert made.config == {"lr": 0.5}


def test_a_rank_with_another_configuration_does_not_train(tmp_path: Path) -> None:
    """It says on which node that is, and what to do."""
    reports = world(tmp_path, {"lr": 0.5}, {"lr": 0.25})
    assert "node node1: elastic3d.run(config=...) is another one here" in reports[1].error
    assert not list(tmp_path.iterdir())
