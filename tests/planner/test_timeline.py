"""Timelines of schedules: everything is computed once, after its inputs, and ranks wait as published."""

from __future__ import annotations

import itertools

import pytest

from elastic3d.planner.pipeline_actions import Pass
from elastic3d.planner.schedules import problem, stages_of_rank
from elastic3d.planner.timeline import MOST, Timeline, timeline
from elastic3d.values import Layout, Schedule

SCHEDULES = [
    Layout(pp=4, dp=1),
    Layout(pp=4, dp=1, schedule=Schedule.GPIPE),
    Layout(pp=4, dp=1, schedule=Schedule.ONE_F_ONE_B),
    Layout(pp=4, dp=1, schedule=Schedule.INTERLEAVED, virtual=3),
    Layout(pp=4, dp=1, schedule=Schedule.ZERO_BUBBLE, virtual=2, zero=2),
    Layout(pp=4, dp=1, schedule=Schedule.ZBV, virtual=2, zero=2),
    Layout(pp=4, dp=1, schedule=Schedule.DUALPIPE_V, virtual=2, zero=2),
]


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [
        pytest.param(layout, count, id=f"{layout.schedule} {count}")
        for layout in SCHEDULES
        for count in (4, 8, 12)
        if problem(layout, blocks=12, micro_batches=count) is None
    ],
)
def test_everything_is_computed_once_and_after_its_inputs(layout: Layout, micro_batches: int) -> None:
    """On the rank that has the stage, one action at a time."""
    drawn = timeline(layout, micro_batches)
    ends: dict[tuple[bool, int, int], float] = {}
    seen: set[tuple[Pass, int, int]] = set()
    for rank, works in enumerate(drawn.ranks):
        assert all(before.end <= after.start + 1e-9 for before, after in itertools.pairwise(works))
        for work in works:
            assert work.stage in stages_of_rank(layout, rank)
            assert (work.kind, work.stage, work.micro_batch) not in seen
            seen.add((work.kind, work.stage, work.micro_batch))
            if work.kind is not Pass.WEIGHT:
                ends[work.kind is Pass.FORWARD, work.stage, work.micro_batch] = work.end
    halves = sum(2 if kind is Pass.BACKWARD else 1 for kind, _, _ in seen)
    assert halves == 3 * layout.stages * micro_batches
    for works in drawn.ranks:
        for work in works:
            stage, number = work.stage, work.micro_batch
            needs = []
            if work.kind is Pass.FORWARD and stage:
                needs.append((True, stage - 1, number))
            elif work.kind is Pass.WEIGHT:
                needs.append((False, stage, number))
            elif work.kind is not Pass.FORWARD:
                needs.append((True, stage, number))
                needs += [(False, stage + 1, number)] if stage + 1 < layout.stages else []
            assert all(ends[need] <= work.start + 1e-9 for need in needs), work


@pytest.mark.parametrize("backward", [2.0, 3.0])
@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [(Layout(pp=4, dp=1), 8), (Layout(pp=4, dp=1, schedule=Schedule.GPIPE), 8), (Layout(pp=16, dp=1), 4096)],
    ids=str,
)
def test_the_bubble_matches_the_published_one(layout: Layout, micro_batches: int, backward: float) -> None:
    """(p - 1)

    (m + p - 1), also for steps that are laid out in part; interleaved, v times less.
    """
    share = (layout.pp - 1) / (micro_batches + layout.pp - 1)
    assert timeline(layout, micro_batches, backward=backward).bubble == pytest.approx(share)
    woven = Layout(pp=layout.pp, dp=1, schedule=Schedule.INTERLEAVED, virtual=2)
    share = (layout.pp - 1) / (2 * micro_batches + layout.pp - 1)
    assert timeline(woven, micro_batches, backward=backward).bubble == pytest.approx(share)


def test_a_split_backward_fills_the_bubble() -> None:
    """That is the purpose of those schedules."""
    plain = timeline(Layout(pp=4, dp=1), 8).bubble
    for layout in SCHEDULES[4:]:
        assert timeline(layout, 8).bubble < plain / 3


def test_without_stages_no_rank_waits() -> None:
    """One rank, forwards and backwards in turn."""
    drawn = timeline(Layout(pp=1, dp=8), 3)
    assert drawn.bubble == 0
    assert [work.kind for work in drawn.ranks[0]] == [Pass.FORWARD, Pass.BACKWARD] * 3


def test_a_long_step_is_laid_out_in_part() -> None:
    """Its end follows from its beginning; nobody can read thousands of micro-batches."""
    drawn: Timeline = timeline(Layout(pp=64, dp=1, schedule=Schedule.ZBV, virtual=2, zero=2), 4096)
    assert drawn.of == 4096
    assert drawn.micro_batches == 128
    assert drawn.bubble < 0.01
    assert timeline(Layout(pp=8, dp=1), MOST).micro_batches < MOST
