"""A schedule on a plain DDP script that torchrun restarts: real agents, a real etcd, no elastic3d in the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from chaos.faults.etcd import EtcdPause
from chaos.faults.moment import Phase, When
from chaos.faults.orders import Join
from chaos.faults.process import Kill, KillTrainer
from chaos.schedules.schedule import Schedule
from chaos.storms.storm import Job, keep, kept_storm, play_storm
from tests.paths import ROOT

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN_DDP = ROOT / "chaos" / "scripts" / "train_ddp.py"


def test_a_plain_script_meets_a_schedule(tmp_path: Path) -> None:
    """A node and a worker die, etcd is away, a node comes: it ends with its undisturbed result, and is kept to replay.

    Generations, steps and losses of nodes are seen from outside, so that moments and the report have them.
    """
    job = Job(script=str(TRAIN_DDP), arguments=("{out}", "100", "0.2"), nodes=3, seed=7, conf={"mode": "restart"})
    faults = (
        Kill(node="rank0", when=When(step=12)),
        Join(when=When(generation=2, phase=Phase.STEPPED)),
        EtcdPause(seconds=2.0, when=When(step=30)),
        KillTrainer(node="rank1", when=When(step=60)),
    )
    schedule = Schedule(faults=faults)
    console = Console(stderr=True)
    storm = play_storm(schedule, job, workdir=tmp_path / "work", kept=tmp_path / "kept", console=console)
    assert storm.kept, "\n".join(storm.verdict.told)
    assert storm.verdict.same_bits
    assert len(storm.outcome.made) == len(faults)
    views = storm.outcome.picture.generations
    assert (len(views[0].nodes), len(views[-1].nodes)) == (3, 3)
    assert "node3" in views[-1].nodes
    assert storm.outcome.picture.step == storm.outcome.setting.steps == 100
    folder = keep(storm, job, tmp_path / "out", tmp_path / "work")
    assert kept_storm(folder) == (schedule, job)
    assert json.loads((folder / "job.json").read_text())["conf"] == {"mode": "restart"}
