"""Ranks that wait, compute long or stand still for a moment are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.score.controls import WAITS, play_control
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(1500), pytest.mark.long]


def test_whoever_waits_computes_long_or_pauses_is_not_named(quiet: Quiet, tmp_path: Path) -> None:
    """A first step that compiles, stalls of the data, storms of garbage, pauses below the deadline, an evaluation."""
    calm = play_control(WAITS, quiet(WAITS.setting(disturbed=False)), workdir=tmp_path)
    assert calm.passed, "\n".join((*calm.alarms, *calm.broken))
