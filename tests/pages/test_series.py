"""The curves of a run: each step once, in bounded memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.pages.series import CHUNK, LAST_STEP, StepFigures, StepSeries


def figures(step: int, *, loss: float | None = 1.0, generation: int = 1, seconds: float = 0.5) -> StepFigures:
    return StepFigures(step=step, loss=loss, seconds=seconds, generation=generation)


def steps(series: StepSeries) -> list[object]:
    return [point[0] for chunk in series.chunks().values() for point in chunk]


def test_a_repeated_step_replaces_what_was_there() -> None:
    """After a death, training goes on from an older step: the curve does too, and stays one."""
    series = StepSeries()
    for step in range(1, 11):
        assert series.add(figures(step, loss=float(step)))
    assert series.add(figures(8, loss=80.0, generation=2))
    points = series.chunks()["0"]
    assert [point[:2] for point in points[-2:]] == [[7, 7.0], [8, 80.0]]
    assert [one.step for one in series.newest] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_late_report_of_a_step_changes_nothing() -> None:
    """Members report one after the other, and not always the newest step last."""
    series = StepSeries()
    series.add(figures(9))
    before = series.chunks()
    assert not series.add(figures(8))
    assert not series.add(figures(9, loss=7.0))
    assert series.chunks() == before


def test_many_steps_take_bounded_memory_and_keep_their_extremes() -> None:
    """All points stand for as many steps; lowest and highest losses are kept, and the newest step is exact."""
    series = StepSeries(most=100)
    for step in range(10_000):
        series.add(figures(step, loss=1000.0 if step == 5_000 else 1.0))
    assert 50 <= len(series) <= 100
    points = [point for chunk in series.chunks().values() for point in chunk]
    assert points[-1][0] == 9_999
    assert max(point[5] for point in points if len(point) > 4 and point[5] is not None) == 1000.0
    assert len({second - first for first, second in zip(steps(series)[:-2], steps(series)[1:-1], strict=True)}) == 1  # type: ignore[operator]


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    """JSON has no such numbers."""
    series = StepSeries()
    for loss in (None, math.nan, math.inf):
        series.add(figures(len(series), loss=loss))
    assert [point[1] for point in series.chunks()["0"]] == [None, None, None]


def test_nonsense_is_passed_over() -> None:
    """Steps and times come from files that anybody may have written."""
    series = StepSeries()
    assert not series.add(figures(-1))
    assert not series.add(figures(LAST_STEP + 1))
    assert not series.add(figures(1, seconds=math.nan))
    assert not series.add(figures(1, seconds=-1.0))
    assert series.chunks() == {}


@given(st.lists(st.tuples(st.integers(-5, 300), st.integers(0, 5)), max_size=400), st.integers(2, 40))
def test_steps_are_always_in_order_and_bounded(reports: list[tuple[int, int]], most: int) -> None:
    """Whatever is reported."""
    series = StepSeries(most=most)
    for step, generation in reports:
        series.add(figures(step, generation=generation))
    shown = steps(series)
    assert shown == sorted(set(shown))  # type: ignore[type-var]
    assert len(shown) <= most
    assert all(len(chunk) <= CHUNK for chunk in series.chunks().values())
