"""How far apart snapshots are taken where the user leaves it open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import UsageError
from elastic3d.snapshots.interval import LEAST_SAMPLES, MOVE_SHARE, SAMPLES, STALL_SHARE, Cost, Interval, at_risk
from elastic3d.worker.options import snapshot_interval


def cost(*, step: float, stall: float = 0.0, move: float = 0.0, samples: int = SAMPLES) -> Cost:
    """What some snapshots and steps cost."""
    measured = Cost()
    for _ in range(samples):
        measured.stepped(step)
        measured.stalled(stall)
        measured.moved(move)
    return measured


@given(step=st.floats(0.001, 100.0), stall=st.floats(0.0, 10.0), move=st.floats(0.0, 1000.0))
def test_both_costs_stay_within_their_shares(step: float, stall: float, move: float) -> None:
    """Of the time between two snapshots, trifles aside; with no more steps between them than that takes."""
    interval = Interval(None)
    needed = cost(step=step, stall=stall, move=move).needed()
    interval.voted(needed)
    between = interval.every * step * 1.000001
    assert stall - 0.005 <= STALL_SHARE * between
    assert move - 0.05 <= MOVE_SHARE * between
    assert interval.every < needed + 1 or interval.every == 1


def test_what_a_busy_host_adds_does_not_count() -> None:
    """One quick snapshot of the last eight shows what they cost; a few cold ones at the start decide nothing."""
    measured = cost(step=0.1, move=2.0, samples=LEAST_SAMPLES - 1)
    assert measured.needed() == 0.0
    measured = cost(step=0.1, move=2.0)
    assert measured.needed() == pytest.approx(39.0)
    measured.moved(0.01)
    assert measured.needed() == 0.0
    for _ in range(SAMPLES):
        measured.moved(2.0)
    assert measured.needed() == pytest.approx(39.0)


def test_an_interval_widens_at_once_and_narrows_when_half_would_do() -> None:
    """So that it does not waver with each measurement."""
    interval, every = Interval(None), []
    for needed in (0.0, 1.2, 7.5, 7.9, 5.0, 4.1, 4.0, 3.0, 0.0):
        interval.voted(needed)
        every.append(interval.every)
    assert every == [1, 2, 8, 8, 8, 8, 4, 4, 1]


def test_snapshots_are_due_so_many_steps_after_the_last() -> None:
    """Also where that was taken for another reason, or the interval changed meanwhile."""
    interval = Interval(None)
    interval.taken(10)
    assert [interval.due(step) for step in (10, 11)] == [False, True]
    interval.voted(4.0)
    assert [step for step in range(11, 17) if interval.due(step)] == [14, 15, 16]
    interval.taken(13)
    assert [step for step in range(13, 18) if interval.due(step)] == [17]


@pytest.mark.parametrize(("fixed", "due"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_what_the_user_says_stays(fixed: int, due: list[int]) -> None:
    """Whatever it costs."""
    interval = Interval(fixed)
    interval.voted(1000.0)
    interval.taken(1)
    assert interval.every == fixed
    assert [step for step in range(1, 5) if interval.due(step)] == due


def test_the_steps_at_risk() -> None:
    """With a snapshot each step: those since it was taken, while it is sent, and until the vote tells."""
    assert [at_risk(every) for every in (1, 2, 10)] == [3, 4, 16]


def test_what_users_write() -> None:
    """A number, or "auto"."""
    assert [snapshot_interval(value) for value in ("auto", 0, 7)] == [None, 0, 7]
    for wrong in (-1, True, "often", 1.5):
        with pytest.raises(UsageError, match="snapshot_every"):
            snapshot_interval(wrong)  # type: ignore[arg-type]
