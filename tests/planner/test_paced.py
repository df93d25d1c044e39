"""Nodes that differ in speed: how long a step takes, who gets less of it to compute, and what a change is worth."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.planner import plan, rank
from elastic3d.planner.legality import unfit
from elastic3d.planner.memory import memory
from elastic3d.planner.paced import share_out, step_seconds
from elastic3d.planner.remedy import Rung, RungKind, choose
from elastic3d.planner.sharing import best_shares, met
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


FLAT = Layout(pp=1, dp=4, zero=2)


@pytest.mark.parametrize(
    ("dp", "leaves", "speed", "even", "lockstep", "ahead", "without"),
    [(4, 16, 0.5, 8, 6, 5, 6), (4, 32, 0.7, 11.4, 10.9, 9, 11), (8, 64, 0.7, 11.4, 9.4, 9, 10)],
)
def test_what_unequal_shares_gain(
    dp: int, leaves: int, speed: float, even: float, lockstep: float, ahead: float, without: float
) -> None:
    """In leaves of a column that is not slow: little without a turn's lead, and more with one than without the node."""
    speeds = (speed, *(1.0,) * (dp - 1))
    shares = best_shares(leaves, speeds)
    assert sum(shares) == leaves
    assert met((), leaves, speeds) == pytest.approx(even, abs=0.05)
    assert met(shares, leaves, speeds) == ahead < met((), leaves, speeds[1:]) == without
    fewer = ((few, *most_even(leaves - few, dp - 1)) for few in range(1, leaves // dp))
    assert min(met(one, leaves, speeds, ahead=0) for one in fewer) == pytest.approx(lockstep, abs=0.05)


def most_even(leaves: int, columns: int) -> tuple[int, ...]:
    return tuple(leaves // columns + (column < leaves % columns) for column in range(columns))


@given(st.lists(st.sampled_from((0.3, 0.5, 0.7, 0.9, 1.0)), min_size=2, max_size=6), st.integers(6, 40))
def test_shares_are_worth_it_or_there_are_none(speeds: list[float], leaves: int) -> None:
    """Every column has some, none that is as fast as the fastest has fewer than a slow one, and the step is shorter.

    With equal shares each column computes something in every turn.
    """
    shares = best_shares(leaves, speeds)
    if not shares:
        return
    assert (sum(shares), min(shares) >= 1) == (leaves, True)
    assert met(shares, leaves, speeds) < -(-leaves // len(speeds)) / min(speeds)
    fast = min(share for share, speed in zip(shares, speeds, strict=True) if speed == max(speeds))
    assert fast >= max((share for share, speed in zip(shares, speeds, strict=True) if speed < max(speeds)), default=0)


def test_a_slow_column_does_not_fill_the_last_turn() -> None:
    """Seven leaves are two turns of four columns, and a slow one that has only one leaf costs nothing."""
    for slow in range(4):
        speeds = tuple(0.7 if column == slow else 1.0 for column in range(4))
        assert best_shares(7, speeds) == tuple(1 if column == slow else 2 for column in range(4))
    assert met((2, 2, 2, 1), 7, (1.0, 1.0, 1.0, 0.7)) == 2.0


def test_shares_for_many_nodes_are_found_in_no_time() -> None:
    """Leaders have other work."""
    began = time.process_time()
    assert best_shares(8192, (0.7,) * 3 + (1.0,) * 1021)[:4] == (6, 6, 6, 9)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("known", [True, False])
def test_a_slow_node_gets_fewer_micro_batches_where_there_are_no_stages(known: bool) -> None:
    """With costs and without, by its place; and the plan for equal nodes is the old one again."""
    model, machines = (profile(), costs()) if known else (SMALL, None)
    request = Layout(pp=1, dp=4, zero=2)
    before = plan(4, 1, model, request, costs=machines)
    slow = plan(4, 1, model, request, costs=machines, previous=before.layout, speeds=(1.0, 0.4, 1.0, 1.0))
    assert min(slow.layout.shares) == slow.layout.shares[1] < min(slow.layout.shares[2:])
    assert slow.seconds < 0.8 * slow.kept
    assert replace(slow.layout, shares=()) == before.layout
    back = plan(4, 1, model, request, costs=machines, previous=slow.layout, speeds=(1.0,) * 4)
    assert (back, back.seconds < back.kept) == (before, True)
    # Another membership, in which nobody is known to be slow.
    assert plan(4, 1, model, request, costs=machines, previous=slow.layout).layout == before.layout
    kept = plan(4, 1, model, request, costs=machines, previous=slow.layout, speeds=(1.0, 0.4, 1.0, 1.0))
    assert kept.layout == slow.layout


def test_shares_stay_as_they_were_asked_for() -> None:
    """And make a layout without stages, of ZeRO-2 where that is free."""
    asked = Layout(dp=4, zero=0, shares=(1, 2, 2, 2))
    for machines in (None, costs()):
        made = plan(4, 1, profile(), asked, costs=machines, speeds=(1.0, 1.0, 1.0, 0.5)).layout
        assert (made.pp, made.shares) == (1, asked.shares)
        assert made.zero in (1, 2)


def test_the_buffers_of_unequal_shares_are_planned_for() -> None:
    """A whole turn is under way: twice the gradient as it is sent."""
    even, uneven = (memory(one, profile())["reduction"] for one in (FLAT, replace(FLAT, shares=(2, 4, 5, 5))))
    whole, largest = 12e6 * 4, 4e6 * 4
    assert (even, uneven) == (5 * largest, largest + 2 * whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reduction": "fast"}, 'need reduction="ordered"'),
        ({"experts": 8}, "do not go with experts="),
    ],
)
def test_what_shares_need(change: dict[str, Any], words: str) -> None:
    """Nothing of the kind is chosen, and what was asked for is refused."""
    model = replace(profile(), **change)
    assert share_out(FLAT, model, 1, (0.5, 1.0, 1.0, 1.0)) is None
    assert words in (unfit(replace(FLAT, shares=(1, 2, 2, 2)), model) or "")
