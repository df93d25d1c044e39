"""Ranks that do not get the processor, or have more to do than others, are no slow or stuck ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.score.controls import CROWDED, play_control
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(1500), pytest.mark.slow]


def test_nobody_is_named_where_others_compute_and_lengths_differ(quiet: Quiet, tmp_path: Path) -> None:
    """Three processes compute beside two nodes on one processor; some micro-batches are 16 times as long."""
    calm = play_control(CROWDED, quiet(CROWDED.setting(disturbed=False)), workdir=tmp_path)
    assert calm.passed, "\n".join((*calm.alarms, *calm.broken))
