"""Predict the time of a step on nodes that differ in speed: pure functions.

The closed forms of `step_time` take the slowest stage for all of them while a pipeline fills and drains, which is right
for even stages and too much where one of them is slow. Here the step is laid out on the planner's own timeline with the
costs of each stage; where that has too many computations, the closed forms must do.

Without costs of machines the result is in an arbitrary unit, and only ratios of two of them mean anything: stages then
cost their FLOPs, or where these are not known either, their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic3d.planner.costs import Costs
from elastic3d.planner.loads import Load, loads
from elastic3d.planner.schedules import rank_of_stage
from elastic3d.planner.step_time import fill, hop, hops, one_round, seconds
from elastic3d.planner.timeline import MOST, StageCost, play
from elastic3d.values import Layout, ModelProfile


def step_seconds(
    layout: Layout, profile: ModelProfile, slots: int, speeds: Sequence[float], costs: Costs | None = None
) -> float:
    """Return the predicted time of one step of a legal layout on nodes of `slots` slots each.

    speeds: of each node in rank order, 1.0 for one as fast as `costs` say, 0.5 for one that takes twice as long.
    """
    by_rank = stage_speeds(layout, slots, speeds) or (1.0,) * layout.pp
    rounds = profile.rounds(layout.dp)
    if costs is None:
        of_rank, way = [_worked(load, profile, by_rank[load.rank]) for load in loads(layout, profile)], 0.0
    else:
        of_rank = [
            one_round(load, layout, profile, costs, slots, by_rank[load.rank]).stage for load in loads(layout, profile)
        ]
        way = hop(layout, profile, costs, slots)
    slowest = max(of_rank, key=lambda cost: cost.whole)
    closed = rounds * slowest.whole + fill(layout, slowest) + hops(layout, rounds) * way
    span = closed
    if 2 * rounds * layout.stages <= MOST:
        stages = [_share(of_rank[rank_of_stage(layout, stage)], layout.virtual) for stage in range(layout.stages)]
        span = max(works[-1].end for works in play(layout, rounds, stages, way))
    if costs is None:
        return span
    parts = seconds(layout, profile, costs, slots, by_rank)
    shared = parts.pop("shared cores", 0.0)
    besides = sum(parts.values()) - closed
    whole = span + besides
    # Processes that share cores take turns, whichever of them waits.
    return max(whole, sum(parts.values()) + shared) if shared else whole


def stage_speeds(layout: Layout, slots: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of each pipeline rank: that of its slowest node; () if nodes are alike."""
    used = speeds[: layout.world // slots]
    if len(set(used)) < 2 and set(used) <= {1.0}:
        return ()
    width = layout.world // layout.pp
    return tuple(
        min(used[rank // slots] for rank in range(stage * width, (stage + 1) * width)) for stage in range(layout.pp)
    )


def block_work(profile: ModelProfile) -> tuple[float, float, float]:
    """Return the work before the blocks, of one block and after them, in FLOPs or, where none are known, in blocks."""
    if not profile.block.flops:
        return 0.0, 1.0, 0.0
    return profile.first.flops, profile.block.flops, profile.last.flops


def _worked(load: Load, profile: ModelProfile, speed: float) -> StageCost:
    before, block, after = block_work(profile)
    each = (load.blocks * block + before * load.first + after * load.last) / speed
    return StageCost(forward=each, input=each, weight=each)


def _share(cost: StageCost, virtual: int) -> StageCost:
    """Return the cost of one of a rank's stages."""
    if virtual == 1:
        return cost
    return StageCost(forward=cost.forward / virtual, input=cost.input / virtual, weight=cost.weight / virtual)
