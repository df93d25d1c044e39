"""A rank that holds all others up is named and the job goes on, with the bits of the undisturbed run.

Real torchrun agents; the script fails once in a chosen way. Times are not judged here: `elastic3d chaos score` measures
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.etcd import EtcdServer
from chaos.score import KINDS, Trial, play_trial, setting
from elastic3d.health.evidence import FOLDER, VERDICT
from elastic3d.values import Layout
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

STEPS = 12
PAIR = Layout(pp=1, dp=2)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("stop", PAIR, id="stop", marks=pytest.mark.long),
        *(pytest.param(kind, PAIR, id=kind, marks=pytest.mark.slow) for kind in KINDS if kind != "stop"),
        *(pytest.param(kind, Layout(pp=2, dp=2), id=f"{kind} of a pipeline", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_whoever_holds_the_job_up_is_named_and_the_bits_stay(
    kind: str, layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """One verdict on the right node, evidence on disk, nothing done in a control, and the same digest in the end."""
    trial = Trial(kind=kind, rank=1, step=5, micro_batch=0, layout=layout)
    undisturbed = quiet(setting(None, layout, STEPS))
    result = play_trial(trial, undisturbed, etcd=job_etcd, workdir=tmp_path, steps=STEPS)
    assert result.broken == (), "\n".join(result.broken)
    if KINDS[kind].control:
        assert result.first is None, result.said
        return
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said
    assert len(list((tmp_path / "events" / FOLDER).glob(f"*/{VERDICT}"))) >= 1
    assert list((tmp_path / "events" / FOLDER).glob("*/slot0/record.bin"))
