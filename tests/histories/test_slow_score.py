"""Nodes that are really slow, in real jobs: the right one is named, within its bar, and nobody where nobody is slow.

Each ends with the bits of a job to which nothing happened.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.etcd import EtcdServer
from chaos.score import KINDS, LONG, SETTLED, Trial, play_trial, setting
from elastic3d.values import Layout
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(600)]

PAIR = Layout(pp=1, dp=2)
SQUARE = Layout(pp=2, dp=2)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("slow", PAIR, id="slow", marks=pytest.mark.long),
        *(
            pytest.param(kind, layout, id=f"{kind} with {layout}", marks=pytest.mark.slow)
            for kind, row in KINDS.items()
            if row.lasts
            for layout in (PAIR, Layout(pp=1, dp=3), SQUARE)
            if (kind, layout) != ("slow", PAIR)
        ),
    ],
)
def test_who_is_slow_is_named(
    kind: str, layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Its node and no other, and what is slow about it; in a control nobody."""
    trial = Trial(kind=kind, rank=1, step=SETTLED, micro_batch=0, layout=layout)
    undisturbed = quiet(setting(None, PAIR, LONG))
    result = play_trial(trial, undisturbed, etcd=job_etcd, workdir=tmp_path, steps=LONG)
    assert result.broken == ()
    assert result.same_bits
    if KINDS[kind].control:
        assert result.first is None, result.said
        return
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said
    assert result.first is not None
    # How soon depends on how busy this machine is besides; the score card says that.
