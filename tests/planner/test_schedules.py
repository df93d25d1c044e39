"""Which layouts a schedule allows, which stages ranks have, and where stages are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from elastic3d.errors import LayoutError
from elastic3d.planner import schedules
from elastic3d.values import Layout, Schedule

EVERY = [(schedule, schedules.VIRTUAL[schedule][0]) for schedule in Schedule]


def problem(layout: Layout, *, blocks: int = 16, micro_batches: int = 8) -> str:
    return schedules.problem(layout, blocks=blocks, micro_batches=micro_batches) or ""


@pytest.mark.parametrize(("schedule", "virtual"), EVERY)
def test_every_schedule_has_layouts(schedule: Schedule, virtual: int) -> None:
    """With enough blocks and micro-batches, and ZeRO-2."""
    for pp, dp, zero in [(2, 1, 2), (2, 2, 2), (4, 1, 2)]:
        layout = Layout(pp=pp, dp=dp, zero=zero, schedule=schedule, virtual=virtual)
        assert problem(layout) == ""


def test_without_a_pipeline_there_is_nothing_to_schedule() -> None:
    """pp=1 takes any number of blocks and micro-batches, but no schedule, stages or cuts."""
    assert problem(Layout(pp=1, dp=8), blocks=1, micro_batches=7) == ""
    for layout in (
        Layout(pp=1, dp=1, schedule=Schedule.GPIPE),
        Layout(pp=1, dp=1, virtual=2),
        Layout(pp=1, dp=1, cuts=(1,)),
    ):
        assert "leave schedule, virtual and cuts out" in problem(layout)


def test_numbers_of_stages_are_checked_against_schedule_and_blocks() -> None:
    """Each schedule takes its own number of stages per rank, and a stage needs a block."""
    assert "has virtual=1 stages" in problem(Layout(pp=2, dp=1, virtual=2))
    assert "has virtual=2 or more" in problem(Layout(pp=2, dp=1, schedule=Schedule.INTERLEAVED))
    assert "has virtual=2 stages" in problem(Layout(pp=2, dp=1, schedule=Schedule.ZBV, virtual=3))
    assert problem(Layout(pp=2, dp=1, schedule=Schedule.INTERLEAVED, virtual=3)) == ""
    assert "more pipeline stages (3) than the model has blocks (2)" in problem(Layout(pp=3, dp=1), blocks=2)
    folded = Layout(pp=2, dp=1, schedule=Schedule.ZBV, virtual=2)
    assert "more pipeline stages (4) than the model has blocks (3)" in problem(folded, blocks=3)


def test_numbers_of_micro_batches_are_checked_against_the_schedule() -> None:
    """One per pipeline rank, for DualPipeV one per stage, for interleaved ones turns of equal size."""
    assert problem(Layout(pp=2, dp=2), micro_batches=4) == ""
    assert "leaves 1 of 4 micro-batches" in problem(Layout(pp=2, dp=4), micro_batches=4)
    assert "leaves 3 of 3" in problem(Layout(pp=4, dp=1, schedule=Schedule.GPIPE), micro_batches=3)
    twice = Layout(pp=2, dp=1, zero=2, schedule=Schedule.DUALPIPE_V, virtual=2)
    assert "as many as stages (4)" in problem(twice, micro_batches=3)
    interleaved = Layout(pp=2, dp=1, schedule=Schedule.INTERLEAVED, virtual=2)
    assert "use 6 or 8 of them" in problem(interleaved, micro_batches=7)
    assert problem(interleaved, micro_batches=6) == ""
    assert problem(Layout(pp=2, dp=1, zero=2, schedule=Schedule.ZBV, virtual=2), micro_batches=2) == ""


def test_a_split_backward_with_zero_3_is_refused() -> None:
    """It would be silently wrong, even for one replica, which bf16 shards as well."""
    for schedule, virtual in EVERY:
        for dp in (1, 2):
            layout = Layout(pp=2, dp=dp, zero=3, schedule=schedule, virtual=virtual)
            assert ("silently wrong" in problem(layout)) == schedule.splits_backward


def test_cuts_must_match_the_stages() -> None:
    """As many as there are boundaries, rising, with a block for each stage; `check` raises what `problem` returns."""
    assert problem(Layout(pp=3, dp=1, cuts=(1, 15))) == ""
    assert "3 stages have 2 cuts" in problem(Layout(pp=3, dp=1, cuts=(1,)))
    for cuts in [(0, 3), (3, 3), (5, 4), (4, 16)]:
        with pytest.raises(LayoutError, match="cuts must rise from 1 to at most 15"):
            schedules.check(Layout(pp=3, dp=1, cuts=cuts), blocks=16, micro_batches=8)


@pytest.mark.parametrize(("schedule", "virtual"), EVERY)
def test_stages_of_ranks_match_torchs(schedule: Schedule, virtual: int) -> None:
    """Loops, or a V if the schedule folds."""
    layout = Layout(pp=3, dp=1, schedule=schedule, virtual=virtual)
    theirs = generate_rank_to_stage_mapping(3, layout.stages, style="v" if schedule.folds else "loop")
    for rank in range(3):
        mine = schedules.stages_of_rank(layout, rank)
        assert list(mine) == sorted(theirs[rank])
        assert {schedules.rank_of_stage(layout, stage) for stage in mine} == {rank}


def test_stages_have_the_blocks_between_their_cuts() -> None:
    """Without cuts, runs of equal length."""
    layout = Layout(pp=3, dp=1)
    assert [len(schedules.blocks_of_stage(layout, stage, 7)) for stage in range(3)] == [3, 2, 2]
    layout = Layout(pp=3, dp=1, cuts=(1, 6))
    assert [list(schedules.blocks_of_stage(layout, stage, 7)) for stage in range(3)] == [[0], [1, 2, 3, 4, 5], [6]]


def test_cuts_account_for_model_ends_and_slow_ranks() -> None:
    """Even runs are (); a heavy head or a slow rank gets fewer blocks."""
    two, three = Layout(pp=2, dp=1), Layout(pp=3, dp=1)
    assert schedules.cuts([1.0] * 8, two) == ()
    assert schedules.cuts([1.0] * 8, two, last=2.0) == (5,)
    assert schedules.cuts([1.0] * 8, two, first=2.0) == (3,)
    assert schedules.cuts([1.0] * 10, three, speeds=(1.0, 0.5, 1.0)) == (4, 6)
    assert schedules.cuts([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], two) == (1,)
    folded = Layout(pp=2, dp=1, schedule=Schedule.ZBV, virtual=2)
    assert schedules.cuts([1.0] * 12, folded, first=2.0, last=2.0) == (2, 6, 10)
    with pytest.raises(LayoutError, match="4 stages need as many blocks"):
        schedules.cuts([1.0] * 3, folded)


@given(
    costs=st.lists(st.integers(1, 9), min_size=4, max_size=9),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shape=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]),
)
def test_no_other_cuts_have_a_lighter_heaviest_stage(
    costs: list[int], ends: tuple[int, int], shape: tuple[int, int]
) -> None:
    """Compared with all possible cuts; with several stages per rank, never worse than runs of equal length."""
    pp, virtual = shape
    layout = Layout(pp=pp, dp=1, virtual=virtual, schedule=Schedule.ZBV if virtual == 2 else None)

    def heaviest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, len(costs))
        ranks = [0.0] * pp
        for stage in range(layout.stages):
            rank = schedules.rank_of_stage(layout, stage)
            ranks[rank] += sum(costs[bounds[stage] : bounds[stage + 1]])
            ranks[rank] += ends[0] * (stage == 0) + ends[1] * (stage == layout.stages - 1)
        return max(ranks)

    even = schedules.even_cuts(len(costs), layout.stages)
    chosen = schedules.cuts(costs, layout, first=ends[0], last=ends[1]) or even
    assert heaviest(chosen) <= heaviest(even)
    if virtual == 1:
        assert heaviest(chosen) == min(map(heaviest, _all_cuts(len(costs), layout.stages)))


@given(
    blocks=st.integers(4, 9),
    ends=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    shape=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]),
    slow=st.sampled_from([1.0, 0.5]),
)
def test_what_cuts_can_gain_is_bounded(blocks: int, ends: tuple[int, int], shape: tuple[int, int], slow: float) -> None:
    """No cuts leave less than the share, and without several stages per rank some leave just that.

    A stage for each block can only be cut in one way, and gains nothing whatever the ends cost.
    """
    pp, virtual = shape
    layout = Layout(pp=pp, dp=1, virtual=virtual, schedule=Schedule.INTERLEAVED if virtual == 2 else None)
    speeds = (*(1.0,) * (pp - 1), slow)

    def heaviest(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, blocks)
        ranks = [0.0] * pp
        for stage in range(layout.stages):
            ranks[stage % pp] += 2 * (bounds[stage + 1] - bounds[stage])
            ranks[stage % pp] += ends[0] * (stage == 0) + ends[1] * (stage == layout.stages - 1)
        return max(rank / speed for rank, speed in zip(ranks, speeds, strict=True))

    share = schedules.best_share(layout, blocks=blocks, block=2, first=ends[0], last=ends[1], speeds=speeds)
    least = share * heaviest(schedules.even_cuts(blocks, layout.stages))
    possible = min(map(heaviest, _all_cuts(blocks, layout.stages)))
    assert least <= possible * (1 + 1e-9)
    if virtual == 1:
        assert least == pytest.approx(possible)
    if blocks == layout.stages:
        assert share == 1.0


def _all_cuts(blocks: int, stages: int, start: int = 1) -> list[tuple[int, ...]]:
    if stages == 1:
        return [()]
    return [(cut, *rest) for cut in range(start, blocks) for rest in _all_cuts(blocks, stages - 1, cut + 1)]
