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


def test_a_model_that_does_not_draw_has_its_samples_made_meanwhile() -> None:
    """Whether it draws is known after its first passes; then the generators are left alone."""
    (report,) = run_world(drawing_mains.who_makes_samples, Orders(layout=ALONE))
    assert report.result == (["MainThread"] * 2, {"elastic3d-samples"}, True)
    (report,) = run_world(partial(drawing_mains.who_makes_samples, draws=True), Orders(layout=ALONE))
    assert report.result == (["MainThread"] * 2, {"MainThread"}, True)
