"""The layouts that a pipeline's schedule allows, the stages of each rank, and the cuts between stages: pure functions.

The limits are those of torch.distributed.pipelining (2.13, `schedules.py`) and of FSDP2 under it:

- 1F1B needs a micro-batch for each stage, and so does DualPipeV; for every schedule we require one per pipeline rank,
  since with fewer some rank would have nothing to do.
- Interleaved 1F1B and interleaved zero bubble run in max(1, m // pp) rounds of equal size.
- Schedules that split the backward pass compute gradients of weights separately, later, from what the forward pass
  kept. Parameters that are sharded again after each forward pass (ZeRO-3) are gone then, and the gradients silently
  wrong.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from elastic3d import values
from elastic3d.errors import LayoutError
from elastic3d.planner.shares import stage_of_block
from elastic3d.values import Layout, Schedule

Weight = Callable[[int, int, int], float]

VIRTUAL: dict[Schedule, tuple[int, int | None]] = {
    Schedule.GPIPE: (1, 1),
    Schedule.ONE_F_ONE_B: (1, 1),
    Schedule.INTERLEAVED: (2, None),
    Schedule.ZERO_BUBBLE: (2, None),
    Schedule.ZBV: (2, 2),
    Schedule.DUALPIPE_V: (2, 2),
}
"""The fewest and the most stages per rank that each schedule takes; None for as many as there are blocks."""


def schedule_of(layout: Layout) -> Schedule | None:
    """Return the schedule that a layout runs: 1F1B if it has stages and names none, None without stages."""
    if layout.pp == 1:
        return None
    return layout.schedule or Schedule.ONE_F_ONE_B


def every_count(layout: Layout, counts: Sequence[int], multiple: int) -> Sequence[int]:
    """Return the numbers of micro-batches with which a layout has to be tried.

    counts: those that a step may have. multiple: of which every one between the smallest and the largest may occur as
    well, where a budget of tokens makes them; 0 for no others. What rounds are too few is known from the smallest.
    """
    turns = schedule_of(layout) in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
    return range(min(counts), max(counts) + 1, multiple) if multiple and turns else counts


def problem(layout: Layout, *, blocks: int, micro_batches: int, leaf: int = 1, multiple: int = 0) -> str | None:
    """Return why a layout cannot run `micro_batches` per step over a model of `blocks`, and what would; None if it can.

    The layout's axes are all chosen. leaf: how many micro-batches in a row one rank runs. multiple: that of a budget of
    tokens which makes them, 0 without one.
    """
    schedule = schedule_of(layout)
    if schedule is None:
        if layout.schedule or layout.virtual != 1 or layout.cuts:
            return f"{layout} has no pipeline to schedule or to cut: leave schedule, virtual and cuts out, or use pp=2"
        return None
    return stages_problem(layout, blocks) or _rounds(layout, schedule, micro_batches, leaf, multiple)


def check(layout: Layout, *, blocks: int, micro_batches: int, leaf: int = 1, multiple: int = 0) -> None:
    """Raise LayoutError if there is a `problem`."""
    reason = problem(layout, blocks=blocks, micro_batches=micro_batches, leaf=leaf, multiple=multiple)
    if reason:
        raise LayoutError(reason)


def stages_problem(layout: Layout, blocks: int) -> str | None:
    """Return why a model of `blocks` cannot be cut into a layout's stages, whatever its batches; None if it can."""
    schedule = schedule_of(layout)
    if schedule is None:
        return None
    least, most = VIRTUAL[schedule]
    if layout.virtual < least or (most is not None and layout.virtual > most):
        wanted = f"virtual={least}" if most == least else f"virtual={least} or more"
        return f"{layout}: schedule {schedule} has {wanted} stages per rank, not {layout.virtual}"
    if layout.stages > blocks:
        return (
            f"{layout} has more pipeline stages ({layout.stages}) than the model has blocks ({blocks}): use fewer "
            "pipeline ranks or stages per rank"
        )
    bounds = (0, *layout.cuts, blocks)
    if layout.cuts and len(layout.cuts) != layout.stages - 1:
        return f"{layout}: {layout.stages} stages have {layout.stages - 1} cuts between them, not {len(layout.cuts)}"
    if layout.cuts and any(start >= stop for start, stop in pairwise(bounds)):
        return f"{layout}: cuts must rise from 1 to at most {blocks - 1}, the last block; they are {layout.cuts}"
    if schedule.splits_backward and layout.zero == 3:
        return (
            f"{layout}: schedule {schedule} computes gradients of weights separately, after ZeRO-3 has freed the "
            "parameters again, and they would be silently wrong; use zero=2, or schedule=interleaved or 1f1b"
        )
    return None


def _rounds(layout: Layout, schedule: Schedule, micro_batches: int, leaf: int, multiple: int) -> str | None:
    rounds = values.rounds(micro_batches, layout.dp, leaf)
    least = layout.stages if schedule is Schedule.DUALPIPE_V else layout.pp
    each = least * layout.dp
    budget = f"TokenBudget(multiple={multiple * each // math.gcd(multiple, each)})" if multiple else ""
    if rounds < least:
        unit = "stages" if schedule is Schedule.DUALPIPE_V else "pipeline ranks"
        return (
            f"{layout} leaves {rounds} of {micro_batches} micro-batches to each pipeline; schedule {schedule} needs as "
            f"many as {unit} ({least}): use fewer {unit} or replicas, or {budget or 'a smaller micro_batch'}"
        )
    if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) and rounds % (rounds // layout.pp):
        turns = rounds // layout.pp
        some = budget or f"{turns * layout.pp} or {(turns + 1) * layout.pp} of them"
        return (
            f"{layout} leaves {rounds} of {micro_batches} micro-batches to each pipeline; schedule {schedule} takes "
            f"them in {turns} turns of equal size: use {some}, another dp, or schedule=1f1b"
        )
    return None


def stages_of_rank(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return the stages of one pipeline rank in the order in which a micro-batch goes forward through them."""
    schedule = schedule_of(layout)
    if schedule is not None and schedule.folds:
        return rank, layout.stages - 1 - rank
    return tuple(range(rank, layout.stages, layout.pp))


def rank_of_stage(layout: Layout, stage: int) -> int:
    """Return the pipeline rank that has a stage."""
    schedule = schedule_of(layout)
    if schedule is not None and schedule.folds:
        return min(stage, layout.stages - 1 - stage)
    return stage % layout.pp


def blocks_of_stage(layout: Layout, stage: int, blocks: int) -> range:
    """Return the numbers of the blocks of a stage."""
    bounds = (0, *(layout.cuts or even_cuts(blocks, layout.stages)), blocks)
    return range(bounds[stage], bounds[stage + 1])


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the cuts of runs of equal length."""
    homes = [stage_of_block(block, blocks, stages) for block in range(blocks)]
    return tuple(homes.index(stage) for stage in range(1, stages))


def cuts(
    costs: Sequence[float],
    layout: Layout,
    *,
    first: float = 0.0,
    last: float = 0.0,
    speeds: Sequence[float] = (),
) -> tuple[int, ...]:
    """Return the cuts for a layout's stages that make its slowest pipeline rank as fast as possible.

    costs: of each block, in any unit of time. first, last: of the parts before and after the blocks. speeds: of each
    pipeline rank, () for equal ones. Returns () if runs of equal length are as good. The slowest single stage is as
    fast as possible; if ranks have several stages, single blocks are moved from there while that helps the slowest
    rank.
    """
    blocks, stages = len(costs), layout.stages
    if stages > blocks:
        raise LayoutError(f"{layout}: {stages} stages need as many blocks; there are {blocks}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    of_rank = [rank_of_stage(layout, stage) for stage in range(stages)]
    speed = [1.0 / speeds[rank] if speeds else 1.0 for rank in of_rank]

    def weight(stage: int, start: int, stop: int) -> float:
        ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return (total[stop] - total[start] + ends) * speed[stage]

    def judge(candidate: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *candidate, blocks)
        return _slowest([weight(stage, bounds[stage], bounds[stage + 1]) for stage in range(stages)], of_rank)

    even = even_cuts(blocks, stages)
    best = min((even, _balanced(stages, blocks, weight)), key=judge)
    while True:
        moved = min(_moves(best, blocks), key=judge, default=best)
        if judge(moved) >= judge(best):
            return () if judge(best) >= judge(even) else best
        best = moved


def best_share(
    layout: Layout, *, blocks: int, block: float, first: float = 0.0, last: float = 0.0, speeds: Sequence[float] = ()
) -> float:
    """Return the share of the slowest rank's time with runs of equal length that remains at best, whatever the cuts.

    1 if none helps. block: cost of each of the equal blocks; the others are those of `cuts`. A lower bound: blocks stay
    whole and each stage has one, but the blocks that a rank gets need not be in a row.
    """
    homes = [rank_of_stage(layout, stage) for stage in range(layout.stages)]
    ends = [0.0] * layout.pp
    ends[homes[0]] += first
    ends[homes[-1]] += last
    even = [0] * layout.pp
    for home, (start, stop) in zip(homes, pairwise((0, *even_cuts(blocks, layout.stages), blocks)), strict=True):
        even[home] += stop - start

    def time(rank: int, count: int) -> float:
        return (ends[rank] + count * block) / (speeds[rank] if speeds else 1.0)

    # Each further block goes to the rank that then takes the least; no other way of giving them out is better.
    nexts = [(time(rank, layout.virtual + 1), rank, layout.virtual + 1) for rank in range(layout.pp)]
    heapq.heapify(nexts)
    slowest = max(time(rank, layout.virtual) for rank in range(layout.pp))
    for _ in range(blocks - layout.stages):
        taken, rank, count = nexts[0]
        slowest = max(slowest, taken)
        heapq.heapreplace(nexts, (time(rank, count + 1), rank, count + 1))
    return slowest / max(time(rank, count) for rank, count in enumerate(even))


def _slowest(single: Sequence[float], of_rank: Sequence[int]) -> tuple[float, float]:
    """Return the times of the slowest rank and of the slowest stage, from those of the stages."""
    ranks = [0.0] * (max(of_rank) + 1)
    for rank, time in zip(of_rank, single, strict=True):
        ranks[rank] += time
    return max(ranks), max(single)


def _balanced(stages: int, blocks: int, weight: Weight) -> tuple[int, ...]:
    """Return the cuts whose heaviest stage is lightest; among those, rather ones with similar weights."""
    lightest: list[tuple[float, float, tuple[int, ...]] | None]
    lightest = [None] + [(weight(0, 0, stop), weight(0, 0, stop) ** 2, ()) for stop in range(1, blocks + 1)]
    for stage in range(1, stages):
        lightest = [
            min(
                (
                    (max(before[0], own), before[1] + own * own, (*before[2], start))
                    for start in range(stage, stop)
                    if (before := lightest[start]) is not None
                    for own in [weight(stage, start, stop)]
                ),
                default=None,
            )
            for stop in range(blocks + 1)
        ]
    best = lightest[blocks]
    assert best is not None
    return best[2]


def _moves(present: tuple[int, ...], blocks: int) -> list[tuple[int, ...]]:
    """Return the cuts that differ from these by one block."""
    bounds = (0, *present, blocks)
    moves = []
    for place in range(1, len(bounds) - 1):
        for cut in (bounds[place] - 1, bounds[place] + 1):
            if bounds[place - 1] < cut < bounds[place + 1]:
                moves.append((*present[: place - 1], cut, *present[place:]))
    return moves
