"""What scripts keep beside the model has the same bits in every layout, and over every change of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from elastic3d.values import Layout
from tests.parallel import extra_mains as mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def ended(reports: list[Report], how: str) -> list[Report]:
    for report in reports:
        assert report.ended == how, report.error
    return reports


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return ended(run_world(mains.followed, Orders(layout=Layout(pp=1, dp=1))), "done")[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=1),
        Layout(pp=1, dp=2, zero=2),
        Layout(pp=1, dp=3, zero=3),
        Layout(pp=2, dp=2, zero=3),
        Layout(pp=1, dp=4, zero=3, replicas=2),
    ],
    ids=str,
)
def test_averages_and_values_are_the_same_in_every_layout(reference: Report, layout: Layout) -> None:
    """Averaged by torch's functions and by the script's, after the step and before it."""
    for report in ended(run_world(mains.followed, Orders(layout=layout)), "done"):
        assert report.result == reference.result


def test_state_saved_in_one_layout_goes_on_in_the_next(reference: Report, tmp_path: Path) -> None:
    """Step by step from world to world, to the end that one rank reaches alone."""
    layouts = [Layout(pp=2, dp=1), Layout(pp=1, dp=3, zero=3), Layout(pp=2, dp=2, zero=2), Layout(pp=1, dp=1)]
    before = None
    for step, layout in enumerate(layouts[:3], 1):
        kept = tmp_path / str(step)
        kept.mkdir()
        orders = Orders(layout=layout, keep=kept, take=before, leave_at=dict.fromkeys(range(layout.world), 0))
        for report in ended(run_world(mains.followed, orders), "left"):
            assert report.error == str(step)
        before = kept
    (last,) = ended(run_world(mains.followed, Orders(layout=layouts[3], take=before)), "done")
    assert last.restored == ("memory", 3, 3)
    assert last.result == reference.result


def test_averages_of_layers_that_are_cut_go_on_in_the_next_layout(tmp_path: Path) -> None:
    """With tensor parallelism, which stays as it is, and some of whose weights are whole on each rank."""
    main = partial(mains.followed, plan="tensor")
    whole = ended(run_world(main, Orders(layout=Layout(pp=1, dp=1, tp=2))), "done")
    leaving = Orders(layout=Layout(pp=1, dp=2, tp=2), keep=tmp_path, leave_at=dict.fromkeys(range(4), 1))
    ended(run_world(main, leaving), "left")
    for report in ended(run_world(main, Orders(layout=Layout(pp=2, dp=1, tp=2), take=tmp_path)), "done"):
        assert report.result == whole[0].result
