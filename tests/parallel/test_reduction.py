"""Reductions over real ranks: one digest for replicas and ZeRO stages, agreement to rounding where none is promised."""

from __future__ import annotations

import pytest

from elastic3d.values import Layout
from tests.parallel import mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def finished(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return finished(run_world(mains.train, Orders(layout=Layout(pp=1, dp=1))))[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, replicas=2, zero=1),
        Layout(pp=1, dp=4, replicas=2, zero=3),
        Layout(pp=1, dp=3, zero=1),
        Layout(pp=2, dp=2, replicas=2, zero=2),
    ],
    ids=Layout.request,
)
def test_replicas_and_zero_stages_do_not_show(reference: Report, layout: Layout) -> None:
    """With sums spread over replicas, uneven shards, unused parameters and clipping there is one digest."""
    equals(reference, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, replicas=2, zero=3),
        Layout(pp=1, dp=4, replicas=2, zero=1),
        Layout(pp=1, dp=4, replicas=2, zero=2),
        Layout(pp=1, dp=4, replicas=4, zero=3),
        Layout(pp=1, dp=6, replicas=3, zero=3),
        Layout(pp=1, dp=6, replicas=2, zero=3),
        Layout(pp=2, dp=4, replicas=2, zero=1),
    ],
    ids=Layout.request,
)
def test_further_replicas_do_not_show(reference: Report, layout: Layout) -> None:
    """More shapes, among them parts of shards that are shorter than others."""
    equals(reference, layout)


def equals(reference: Report, layout: Layout) -> None:
    reports = finished(run_world(mains.train, Orders(layout=layout)))
    assert {report.result for report in reports} == {reference.result}
    for report in reports:
        mine = [(r.step, r.loss, r.gradient_norm) for r in report.records]
        assert mine == [(r.step, r.loss, r.gradient_norm) for r in reference.records]
