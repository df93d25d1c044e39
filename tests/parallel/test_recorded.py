"""What real ranks record of their collectives, under every way of computing together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic3d.health.phases import Axis, Phase
from elastic3d.planner import place_of
from elastic3d.values import Layout, Schedule
from tests.parallel import recorded_mains
from tests.parallel.recorded_mains import Program
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo

V = Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZBV, virtual=2)
GROUPS = (Axis.WORLD, Axis.DP, Axis.SHARD)
MEETING = ((Axis.TO_NEXT, Axis.FROM_PREVIOUS), (Axis.TO_PREVIOUS, Axis.FROM_NEXT))


def of_axis(program: Program, axis: Axis) -> list[int]:
    return [mark for one, mark in program if one == axis]


@pytest.mark.parametrize(
    ("main", "layout"),
    [
        (recorded_mains.ordered, Layout(pp=1, dp=2, zero=3)),
        (recorded_mains.ordered, Layout(pp=2, dp=1, schedule=Schedule.INTERLEAVED, virtual=2)),
        pytest.param(recorded_mains.fast, Layout(pp=1, dp=2, zero=2), marks=pytest.mark.slow),
        pytest.param(recorded_mains.ordered, Layout(pp=3, dp=1), marks=pytest.mark.slow),
        pytest.param(recorded_mains.ordered, Layout(pp=1, dp=4, replicas=2), marks=pytest.mark.slow),
        pytest.param(recorded_mains.compressed, Layout(pp=1, dp=4, replicas=2), marks=pytest.mark.slow),
        pytest.param(recorded_mains.ordered, V, marks=pytest.mark.slow),
        pytest.param(recorded_mains.ordered, Layout(pp=2, dp=2, schedule=Schedule.GPIPE), marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_ranks_record_the_same_operations_in_the_same_order(main: Callable[..., Any], layout: Layout) -> None:
    """Each step is like the one before, and what one rank waits for another one has posted, alike."""
    reports = run_world(main, Orders(layout=layout))
    seen: list[list[Any]] = []
    for report in reports:
        assert report.ended == "done", report.error
        seen.append(report.result)
    for rank in seen:
        for step, (record, program) in enumerate(rank):
            assert (record.step, record.made, record.phase, record.odd) == (step + 1, step + 1, Phase.USER, "")
            assert record.wait is None
            assert all(count.posted == count.done for count in record.axes), record.axes
            assert program == rank[0][1]
    for step in range(recorded_mains.STEPS):
        ranks = [rank[step][1] for rank in seen]
        for one, program in enumerate(ranks):
            for other, another in enumerate(ranks):
                here, there = place_of(one, layout), place_of(other, layout)
                if here.pp == there.pp:
                    assert all(of_axis(program, axis) == of_axis(another, axis) for axis in GROUPS)
                if layout.pp > 1 and here.dp == there.dp and there.pp == (here.pp + 1) % layout.pp and one < other:
                    for sent, received in MEETING[:1]:
                        assert of_axis(program, sent) == of_axis(another, received) != []
                    for sent, received in MEETING[1:]:
                        assert of_axis(another, sent) == of_axis(program, received) != []
