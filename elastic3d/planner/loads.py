"""The part of the model that each pipeline rank computes and keeps: how many blocks, and which ends of the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from elastic3d.planner.schedules import rank_of_stage, schedule_of
from elastic3d.values import Layout, ModelPart, ModelProfile, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A pipeline rank's part of the model, over all its stages."""

    rank: int
    blocks: int
    first: bool
    last: bool

    def parts(self, profile: ModelProfile) -> list[tuple[ModelPart, int]]:
        """Return the rank's parts of the model, and how many of each."""
        ends = [(profile.first, 1)] * self.first + [(profile.last, 1)] * self.last
        return [(profile.block, self.blocks), *ends]


def loads(layout: Layout, profile: ModelProfile) -> tuple[Load, ...]:
    """Return the load of each pipeline rank."""
    folds = (schedule_of(layout) or Schedule.ONE_F_ONE_B).folds
    return _loads(layout.pp, layout.virtual, folds, layout.cuts, profile.blocks)


def telling(layout: Layout, profile: ModelProfile) -> tuple[Load, ...]:
    """Return the loads among which the slowest and the fullest rank are.

    Of equal loads only the first: no later rank keeps more micro-batches.
    """
    folds = (schedule_of(layout) or Schedule.ONE_F_ONE_B).folds
    return _telling(layout.pp, layout.virtual, folds, layout.cuts, profile.blocks)


def parameters_of(part: ModelPart, tp: int) -> float:
    """Return the parameters of a part that one tensor-parallel rank holds."""
    return part.parameters - part.cut + part.cut / tp


def held(load: Load, profile: ModelProfile, layout: Layout) -> float:
    """Return the parameters of a load on one tensor-parallel rank, before any sharding; a tied table counts twice."""
    own = sum(count * parameters_of(part, layout.tp) for part, count in load.parts(profile))
    if profile.tied and load.last and not load.first:
        own += parameters_of(profile.first, layout.tp)
    return own


@functools.lru_cache(maxsize=8192)
def _telling(pp: int, virtual: int, folds: bool, cuts: tuple[int, ...], blocks: int) -> tuple[Load, ...]:
    seen: dict[tuple[int, bool, bool], Load] = {}
    for load in _loads(pp, virtual, folds, cuts, blocks):
        seen.setdefault((load.blocks, load.first, load.last), load)
    return tuple(seen.values())


def _loads(pp: int, virtual: int, folds: bool, cuts: tuple[int, ...], blocks: int) -> tuple[Load, ...]:
    layout = Layout(pp=pp, dp=1, virtual=virtual, cuts=cuts, schedule=Schedule.ZBV if folds else None)
    stages = layout.stages
    # Where equal runs begin, as in `stage_of_block`: at the first block whose number times stages reaches the next.
    bounds = (0, *cuts, blocks) if cuts else tuple(-(-stage * blocks // stages) for stage in range(stages + 1))
    held = [0] * pp
    for stage in range(stages):
        held[rank_of_stage(layout, stage)] += bounds[stage + 1] - bounds[stage]
    last = rank_of_stage(layout, stages - 1)
    return tuple(Load(rank=rank, blocks=count, first=rank == 0, last=rank == last) for rank, count in enumerate(held))
