"""Predict the time of a step on nodes that differ in speed: pure functions.

The closed forms of `step_time` take the slowest stage for all of them while a pipeline fills and drains, which is right
for even stages and too much where one of them is slow. Here the step is laid out on the planner's own timeline with the
costs of each stage; where that has too many computations, the closed forms must do.

Data-parallel ranks may have unequal shares of the micro-batches; the step then takes as many rounds of one that is not
slow as `sharing.met` says.

Without costs of machines the result is in an arbitrary unit, and only ratios of two of them mean anything: stages then
cost their FLOPs, or where these are not known either, their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic3d.planner.costs import Costs
from elastic3d.planner.legality import unshared
from elastic3d.planner.loads import Load, loads
from elastic3d.planner.schedules import rank_of_stage
from elastic3d.planner.sharing import best_shares, column_speeds, met
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
    shared = shared_rounds(layout, profile, slots, speeds)
    rounds = profile.rounds(layout.dp) if shared is None else shared
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
    if shared is None and 2 * rounds * layout.stages <= MOST:
        stages = [_share(of_rank[rank_of_stage(layout, stage)], layout.virtual) for stage in range(layout.stages)]
        span = max(works[-1].end for works in play(layout, profile.rounds(layout.dp), stages, way))
    if costs is None:
        return span
    parts = seconds(layout, profile, costs, slots, by_rank, shared)
    in_turns = parts.pop("shared cores", 0.0)
    besides = sum(parts.values()) - closed
    whole = span + besides
    # Processes that share cores take turns, whichever of them waits.
    return max(whole, sum(parts.values()) + in_turns) if in_turns else whole


def stage_speeds(layout: Layout, slots: int, speeds: Sequence[float]) -> tuple[float, ...]:
    """Return the speed of each pipeline rank: that of its slowest node; () if nodes are alike, or have unequal shares.

    What slow nodes have less of then makes up for it, and `shared_rounds` says how far.
    """
    if layout.shares:
        return ()
    used = speeds[: layout.world // slots]
    if len(set(used)) < 2 and set(used) <= {1.0}:
        return ()
    width = layout.world // layout.pp
    return tuple(
        min(used[rank // slots] for rank in range(stage * width, (stage + 1) * width)) for stage in range(layout.pp)
    )


def shared_rounds(layout: Layout, profile: ModelProfile, slots: int, speeds: Sequence[float]) -> float | None:
    """Return how many rounds of a rank that is not slow a step with unequal shares takes; None for equal ones."""
    if not layout.shares:
        return None
    return profile.leaf * met(layout.shares, profile.leaves, column_speeds(layout, slots, speeds))


def share_out(layout: Layout, profile: ModelProfile, slots: int, speeds: Sequence[float]) -> Layout | None:
    """Return the layout with the shares that suit its nodes best; None where equal ones do, or others cannot be."""
    possible = layout.pp == 1 and layout.zero in (1, 2) and not layout.shares and profile.chunks == 1
    if not possible or unshared(layout, profile.reduction, bool(profile.experts), profile.fewest):
        return None
    shares = best_shares(profile.leaves, column_speeds(layout, slots, speeds))
    return replace(layout, shares=shares) if shares else None


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
