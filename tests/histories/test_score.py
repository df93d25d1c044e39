"""A sample of the score card: some faults in one job, as `elastic3d chaos score` has hundreds of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.score.card import card
from chaos.score.playing import setting
from chaos.score.series import QUIET, Series, play_series, steps_of
from chaos.score.trials import Trial
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(300)]

PAIR = Layout(pp=1, dp=2)
FAULTS = (("stop", 1, 5), ("skip", 0, 11))


def test_some_faults_of_the_score_card_are_found(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A rank that stops and one that leaves out a collective: called that, named, cured, and no bit differs."""
    given = [Trial(kind=kind, rank=rank, step=step, micro_batch=0, layout=PAIR) for kind, rank, step in FAULTS]
    results, missed = play_series(
        Series(trials=tuple(given)),
        lambda steps: quiet(setting(None, QUIET, steps)),
        etcd=job_etcd,
        workdir=tmp_path,
        steps=steps_of(len(given)),
    )
    assert missed == []
    assert [result.broken for result in results] == [()] * len(given)
    rows = card(results)
    assert [row.kind for row in rows] == [kind for kind, _, _ in FAULTS]
    assert all(row.passed for row in rows), rows
