"""Nodes that differ in speed: how long a step takes, which stages get fewer blocks, and what a change is worth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from elastic3d.planner import plan, rank
from elastic3d.planner.paced import step_seconds
from elastic3d.planner.remedy import Rung, RungKind, choose
from elastic3d.values import Layout, ModelProfile, Schedule
from tests.planner.machines import costs, profile

SMALL = ModelProfile(blocks=8, parameters=1, micro_batches=8, micro_batch=1, digest="job")
CHAIN = Layout(pp=4, dp=1, schedule=Schedule.ONE_F_ONE_B)


def test_a_slow_stage_counts_once_while_a_pipeline_fills() -> None:
    """Its micro-batches take longer; the others' parts of filling and draining do not."""
    even = step_seconds(CHAIN, SMALL, 1, (1.0,) * 4)
    assert even == (8 + 3) * 3 * 2
    slow = step_seconds(CHAIN, SMALL, 1, (1.0, 0.5, 1.0, 1.0))
    assert 8 * 12 < slow < (8 + 3) * 12


def test_all_data_parallel_ranks_wait_for_a_slow_one() -> None:
    """A step without stages takes as long as its slowest node."""
    flat = Layout(pp=1, dp=4)
    times = [step_seconds(flat, SMALL, 1, speeds) for speeds in ((1.0,) * 4, (1.0, 1.0, 1.0, 0.5))]
    assert times[1] == 2 * times[0]


@pytest.mark.parametrize("layout", [CHAIN, Layout(pp=1, dp=4), Layout(pp=2, dp=2, schedule=Schedule.GPIPE)])
def test_equal_speeds_take_as_long_as_the_closed_forms_say(layout: Layout) -> None:
    """The timeline and the planner's ranking agree on even stages."""
    model, machines = profile(), costs()
    (candidate,) = [
        one
        for one in rank(4, 1, model, layout, machines).ranking
        if (one.layout.pp, one.layout.dp, one.layout.zero, one.layout.schedule, one.layout.cuts)
        == (layout.pp, layout.dp, layout.zero, layout.schedule, ())
    ]
    assert step_seconds(candidate.layout, model, 1, (1.0,) * 4, machines) == pytest.approx(candidate.seconds, rel=0.05)


@pytest.mark.parametrize("known", [True, False])
def test_a_slow_nodes_stage_gets_fewer_blocks(known: bool) -> None:
    """With costs and without; and the plan for equal nodes is the old one again."""
    model = profile() if known else SMALL
    machines = costs() if known else None
    request = Layout(pp=4, dp=1)
    before = plan(4, 1, model, request, costs=machines)
    slow = plan(4, 1, model, request, costs=machines, previous=before.layout, speeds=(1.0, 1.0, 0.4, 1.0))
    bounds = (0, *slow.layout.cuts, model.blocks)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert min(sizes) == sizes[2]
    assert slow.seconds < slow.kept
    back = plan(4, 1, model, request, costs=machines, previous=slow.layout, speeds=(1.0,) * 4)
    assert back.layout == before.layout
    assert back.seconds < back.kept
    assert back == before


def test_a_layout_is_kept_where_no_other_is_faster() -> None:
    """Nothing is predicted where no speeds are given."""
    flat = Layout(pp=1, dp=4)
    made = plan(4, 1, SMALL, Layout(pp=1), previous=flat, speeds=(1.0, 0.5, 1.0, 1.0))
    assert (made.layout, made.seconds) == (flat, made.kept)
    assert plan(4, 1, SMALL, Layout(pp=1), previous=flat).seconds == 0.0


RECUT = Rung(kind=RungKind.RECUT, before=10.0, after=8.0, cost=30.0)


def test_a_change_is_due_once_it_would_have_saved_what_it_costs() -> None:
    """A fifth of the time is lost: after 150 s that is 30 s."""
    assert choose([RECUT], 149.0) is None
    assert choose([RECUT], 150.0) is RECUT
    again = replace(RECUT, uses=2.0)
    assert choose([again], 599.0) is None
    assert choose([again], 600.0) is again


def test_what_is_worth_most_is_taken_of_what_is_due() -> None:
    """And nothing that predictions are too coarse for, or that is only reported beside what can be done."""
    swap = Rung(kind=RungKind.SWAP, before=10.0, after=7.0, cost=30.0)
    little = Rung(kind=RungKind.RECUT, before=10.0, after=9.6, cost=30.0)
    told = Rung(kind=RungKind.EVICT, before=10.0, after=5.0, cost=30.0, acts=False)
    assert choose([RECUT, swap], 200.0) is swap
    assert choose([little], 1e9) is None
    assert choose([RECUT, told], 1e9) is RECUT
    assert choose([little, told], 1e9) is told
