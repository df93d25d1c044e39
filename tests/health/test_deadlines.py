"""How long a rank may be silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.health.deadlines import Allowance, allowance
from elastic3d.health.phases import Phase
from elastic3d.health.record import ProgressRecord
from elastic3d.membership.stalls import Wait

WAIT = Wait(axis="dp", number=3)


def record(**changes: Any) -> ProgressRecord:
    usual = ProgressRecord(ticks=1, at=0, beat=0, phase=Phase.FORWARD, step=9, made=9)
    return replace(usual, **changes)


@pytest.mark.parametrize(
    ("present", "idle", "busy", "named"),
    [
        (record(), 3, 30, 3),
        (record(longest={Phase.FORWARD: 2.0, Phase.DATA: 100.0}), 8, 30, 8),
        (record(longest={Phase.FORWARD: 10.0}), 40, 80, 40),
        (record(phase=Phase.DATA), 30, 30, 30),
        (record(phase=Phase.COPY), 30, 30, 30),
        (record(phase=Phase.USER), 60, 60, 60),
        (record(made=1), 60, 900, 60),
        (record(phase=Phase.RESTORE, made=0), 60, 900, 60),
        (record(phase=Phase.PAUSE, pause=600.0), 600, 600, 600),
        (record(wait=WAIT, longest={Phase.FORWARD: 50.0}), 3, 30, 3),
        (record(wait=WAIT, longest_wait=20.0), 80, 160, 3),
        (record(wait=WAIT, made=0), 60, 900, 15),
    ],
)
def test_silence_is_allowed_by_what_a_rank_is_at(
    present: ProgressRecord, idle: float, busy: float, named: float
) -> None:
    """By phase, by the longest gaps of its own last steps, and generously until two steps are made."""
    assert allowance(present, 3.0) == Allowance(idle=idle, busy=busy, named=named)


@given(
    st.sampled_from(Phase),
    st.integers(min_value=0, max_value=5),
    st.floats(min_value=0, max_value=1e4),
    st.booleans(),
    st.floats(min_value=1, max_value=1e3),
)
def test_a_rank_is_never_allowed_less_than_asked_for(
    phase: Phase, made: int, gap: float, waits: bool, stuck: float
) -> None:
    """Nor less while it computes than while it does nothing; named at the latest when it has been idle too long."""
    present = record(
        phase=phase, made=made, longest={phase: gap}, longest_wait=gap, wait=WAIT if waits else None, pause=2000.0
    )
    allowed = allowance(present, stuck)
    assert stuck <= allowed.named <= allowed.idle <= allowed.busy
    assert phase is Phase.PAUSE or allowed.idle >= 4 * gap
