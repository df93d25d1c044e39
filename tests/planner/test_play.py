"""Schedules on a clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.planner.pipeline_actions import Pass
from elastic3d.planner.schedules import problem, rank_of_stage
from elastic3d.planner.timeline import ScheduledAction, StageCost, kept, play
from elastic3d.values import Layout, Schedule

EVEN = StageCost(forward=1.0, input=1.0, weight=1.0)
COSTS = st.builds(StageCost, forward=st.floats(0.1, 5), input=st.floats(0.1, 5), weight=st.floats(0.1, 5))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, int, list[StageCost], float]:
    schedule = draw(st.sampled_from(Schedule))
    virtual = {Schedule.GPIPE: 1, Schedule.ONE_F_ONE_B: 1, Schedule.ZBV: 2, Schedule.DUALPIPE_V: 2}.get(
        schedule, draw(st.integers(2, 3))
    )
    layout = Layout(pp=draw(st.integers(2, 5)), dp=1, zero=2, schedule=schedule, virtual=virtual)
    turns = draw(st.integers(2, 4))
    costs = [draw(COSTS) for _ in range(layout.stages)]
    return layout, turns * layout.pp, costs, draw(st.floats(0, 2))


def check(layout: Layout, costs: list[StageCost], hop: float, made: Sequence[Sequence[ScheduledAction]]) -> None:
    ended: dict[tuple[Pass, int, int], float] = {}
    for works in made:
        for before, after in itertools.pairwise(works):
            assert after.start >= before.end
        for work in works:
            kind = Pass.INPUT if work.kind is Pass.BACKWARD else work.kind
            ended[kind, work.stage, work.micro_batch] = work.end
            assert work.end - work.start == pytest.approx(costs[work.stage].of(work.kind))
    for work in itertools.chain.from_iterable(made):
        forward, stage, number = work.kind is Pass.FORWARD, work.stage, work.micro_batch
        source = stage - 1 if forward else stage + 1
        if work.kind is Pass.WEIGHT:
            assert work.start >= ended[Pass.INPUT, stage, number]
        elif 0 <= source < layout.stages:
            way = hop if rank_of_stage(layout, source) != rank_of_stage(layout, stage) else 0.0
            assert work.start >= ended[Pass.FORWARD if forward else Pass.INPUT, source, number] + way - 1e-9
        if not forward:
            assert work.start >= ended[Pass.FORWARD, stage, number]


@given(cases())
def test_no_action_begins_before_its_inputs(case: tuple[Layout, int, list[StageCost], float]) -> None:
    """Actions of a rank follow each other; inputs have arrived; a stage goes back after it went forward."""
    layout, rounds, costs, hop = case
    if problem(layout, blocks=64, micro_batches=rounds) is None:
        check(layout, costs, hop, play(layout, rounds, costs, hop))


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("turns", [1, 2, 4])
def test_bubbles_match_the_papers(pp: int, turns: int) -> None:
    """(p - 1) passes of a stage for GPipe and 1F1B, interleaved or not; a third of that with split backwards."""
    rounds = turns * pp

    def wait(schedule: Schedule, virtual: int = 1) -> float:
        layout = Layout(pp=pp, dp=1, zero=2, schedule=schedule, virtual=virtual)
        return max(own[-1].end for own in play(layout, rounds, [EVEN] * layout.stages)) - 3 * rounds * virtual

    assert wait(Schedule.GPIPE) == 3 * (pp - 1)
    assert wait(Schedule.ONE_F_ONE_B) == 3 * (pp - 1)
    assert wait(Schedule.INTERLEAVED, 2) == 3 * (pp - 1)
    assert wait(Schedule.INTERLEAVED, 4) == 3 * (pp - 1)
    assert wait(Schedule.ZERO_BUBBLE, 2) == pp - 1
    if turns > 1:
        # The rest is that ranks begin one after another, and all wait until the last has ended.
        assert wait(Schedule.ZBV, 2) == wait(Schedule.DUALPIPE_V, 2) == pp - 1


def test_kept_micro_batches_match_the_schedule() -> None:
    """1F1B keeps at most as many as there are stages left; GPipe keeps all."""
    for schedule, expected in ((Schedule.GPIPE, [8] * 4), (Schedule.ONE_F_ONE_B, [4, 3, 2, 1])):
        assert list(map(kept, play(Layout(pp=4, dp=1, schedule=schedule), 8, [EVEN] * 4))) == expected
