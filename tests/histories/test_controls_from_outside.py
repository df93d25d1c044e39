"""What happens around a job is no rank's fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.score.controls import OUTSIDE, play_control
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(1500), pytest.mark.slow]


def test_nobody_is_named_for_a_slow_store_an_etcd_that_is_away_and_nodes_that_join(
    quiet: Quiet, tmp_path: Path
) -> None:
    """Two outages of etcd and two joins, while every request to the store takes a second more."""
    calm = play_control(OUTSIDE, quiet(OUTSIDE.setting(disturbed=False)), workdir=tmp_path)
    assert calm.passed, "\n".join((*calm.alarms, *calm.broken))
