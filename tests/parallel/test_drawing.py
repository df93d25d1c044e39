"""Models that draw from the global random numbers of Python and numpy: the same bits in every layout."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest

from elastic3d.values import Layout
from tests.parallel import drawing_mains
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo

ALONE = Layout(pp=1, dp=1)


Result = tuple[str, list[float], list[float]]


def results(layout: Layout, **options: Any) -> list[Result]:
    reports = run_world(partial(drawing_mains.train, **options), Orders(layout=layout))
    for report in reports:
        assert report.ended == "done", report.error
    return [report.result for report in reports]


@cache
def alone(**options: Any) -> Result:
    (result,) = results(ALONE, **options)
    return result


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2),
        Layout(pp=2, dp=1),
        pytest.param(Layout(pp=1, dp=4, replicas=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=2, zero=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_and_passes_draw_the_same_in_every_layout(layout: Layout) -> None:
    assert {str(result[:2]) for result in results(layout)} == {str(alone()[:2])}


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"own": 5}], ids=["recomputed", "beside the script"])
def test_what_is_computed_again_and_what_a_script_draws_itself_change_nothing(options: dict[str, Any]) -> None:
    """Blocks draw in the backward pass what they drew in the forward pass; the script's own draws are its own."""
    assert results(ALONE, **options) == [alone()]


@pytest.mark.parametrize(
    "layout", [Layout(pp=1, dp=2), pytest.param(Layout(pp=2, dp=1), marks=pytest.mark.slow)], ids=str
)
def test_an_evaluation_draws_the_same_in_every_layout_and_changes_nothing(layout: Layout) -> None:
    expected = alone(evaluates=True)
    assert expected[:2] == alone()[:2]
    assert set(map(str, results(layout, evaluates=True))) == {str(expected)}
    assert len(set(expected[2])) == drawing_mains.STEPS + 1


SURE, UNSURE = (False,) * 4, (False, False, True, False)
ONCE = 1 + -(-11 // 2) * (1 + 2 * drawing_mains.BLOCKS)
"""Seeds of one evaluation on one rank: for all of it, of each micro-batch's start, and before and after each block."""


@cache
def at_times(layout: Layout, draws: tuple[bool, ...]) -> list[tuple[list[float], list[tuple[float, ...]], int]]:
    reports = run_world(partial(drawing_mains.evaluate_at_times, draws=draws), Orders(layout=layout))
    for report in reports:
        assert report.ended == "done", report.error
    return [report.result for report in reports]


@pytest.mark.parametrize("draws", [UNSURE, (True,) * 2], ids=["from the third on", "always"])
@pytest.mark.parametrize(
    "layout", [Layout(pp=1, dp=2), pytest.param(Layout(pp=2, dp=1), marks=pytest.mark.slow)], ids=str
)
def test_an_evaluation_that_draws_is_the_same_in_every_layout(layout: Layout, draws: tuple[bool, ...]) -> None:
    """Also where earlier evaluations of the model drew nothing, and later ones were not seeded."""
    ((expected, _, _),) = at_times(ALONE, draws)
    assert [values for values, _, _ in at_times(layout, draws)] == [expected] * layout.world


def test_evaluations_of_a_model_that_draws_nothing_are_seeded_once() -> None:
    """Once it has drawn, they are from then on; what the script draws afterwards never depends on it."""
    ((_, own, last),) = at_times(ALONE, SURE)
    assert (len(set(own)), last) == (1, 1)
    ((_, other, last),) = at_times(ALONE, UNSURE)
    assert (own, last) == (other, ONCE)


def test_a_model_that_does_not_draw_has_its_samples_made_meanwhile() -> None:
    """Whether it draws is known after its first passes; then the generators are left alone."""
    (report,) = run_world(drawing_mains.who_makes_samples, Orders(layout=ALONE))
    assert report.result == (["MainThread"] * 2, {"elastic3d-samples"}, True)
    (report,) = run_world(partial(drawing_mains.who_makes_samples, draws=True), Orders(layout=ALONE))
    assert report.result == (["MainThread"] * 2, {"MainThread"}, True)
