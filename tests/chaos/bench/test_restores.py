"""The measurement of restores, at a size that says nothing about speed."""

from __future__ import annotations

import pytest

from chaos.bench import restores

pytestmark = pytest.mark.long


def test_both_ways_are_measured_in_turns() -> None:
    """Each turn has a partner, and neither way came for nothing."""
    measured = restores.measure(2, megabytes=4)
    assert len(measured.mapped) == len(measured.tcp) == len(measured.ratios()) == len(measured.work_ratios()) == 2
    assert all(turn.seconds > 0 for turn in (*measured.mapped, *measured.tcp))
    assert restores.table(measured).row_count == 2
