"""Predict the time of one step of a layout, by contributor: pure functions.

Pipelines: the slowest rank computes all its micro-batches, and waits while the pipeline fills and drains. The wait is
(p - 1) passes of a stage for GPipe and 1F1B and of a v times smaller one interleaved (Narayanan et al. 2021, arXiv
2104.04473, section 2.2), and (p - 1)(F + I - W) for zero bubble (Qi et al. 2024, arXiv 2401.10241, section 2.3, ZB-H1).
These are closed forms, because a planner compares thousands of layouts; a test compares them with each timeline.

Communication per device, of n ranks and b bytes: (n - 1) / n * b for a gather, a reduce-scatter or an all-to-all, twice
that for an all-reduce (Rajbhandari et al. 2020, arXiv 1910.02054, section 7), and a latency for each of n - 1 messages.
Tensor parallelism all-reduces a block's output twice each way (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.planner.costs import Costs, Link
from elastic3d.planner.loads import Load, held, loads, telling
from elastic3d.planner.memory import kept_by
from elastic3d.planner.schedules import schedule_of
from elastic3d.planner.timeline import StageCost
from elastic3d.values import Layout, ModelProfile, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds that one micro-batch takes on a pipeline rank, over all its stages, without hidden communication."""

    stage: StageCost
    compute: float
    overhead: float
    tensor: float
    gathers: float
    reduction: float

    @property
    def whole(self) -> float:
        """Seconds in all."""
        return self.stage.whole


def seconds(
    layout: Layout, profile: ModelProfile, costs: Costs, slots: int, speeds: Sequence[float] = ()
) -> dict[str, float]:
    """Return the seconds of one step by contributor, none of them 0. speeds: of each pipeline rank, () if equal."""
    rounds = -(-profile.micro_batches // layout.dp)
    timed = [
        (load, one_round(load, layout, profile, costs, slots, speeds[load.rank] if speeds else 1.0))
        for load in (loads if speeds else telling)(layout, profile)
    ]
    slowest_load, slowest = max(timed, key=lambda pair: pair[1].whole)
    way = hop(layout, profile, costs, slots)
    parts = {
        "compute": rounds * slowest.compute,
        "overhead": rounds * slowest.overhead + costs.step,
        "tensor parallel": rounds * slowest.tensor,
        "gathers": rounds * slowest.gathers + _once(slowest_load, layout, profile, costs, slots),
        "reduction": rounds * slowest.reduction,
        "bubble": fill(layout, slowest.stage),
        "hops": hops(layout, rounds) * way,
        "optimizer": _update(slowest_load, layout, profile, costs),
    }
    if costs.cores:
        # Processes that share cores take turns: even if it overlaps in time, the work adds up.
        works = layout.world * (sum(parts.values()) - parts["bubble"] - parts["hops"]) / costs.cores
        parts["shared cores"] = max(0.0, works - sum(parts.values()))
    return {name: value for name, value in parts.items() if value}


def one_round(load: Load, layout: Layout, profile: ModelProfile, costs: Costs, slots: int, speed: float = 1.0) -> Round:
    """Return the seconds of one micro-batch on a pipeline rank."""
    flops = layout.tp * costs.device.flops * speed
    forward = again = 0.0
    for part, count in load.parts(profile):
        forward += count * part.flops / flops
        again += count * kept_by(part, profile.recompute).again / flops
    fixed = costs.forward * layout.virtual / speed
    tensor = load.blocks * 2 * _all_reduce(profile.boundary, layout.tp, costs.inside) if layout.tp > 1 else 0.0
    repeated = 1.0 if profile.recompute == "full" else 0.0
    own, link = held(load, profile, layout), shard_link(layout, costs, slots)
    gather = _exchange(own * profile.compute_bytes, layout.shards, link, units(load)) if layout.zero == 3 else 0.0
    reduce = _reduction(own, load, layout, profile, costs, slots)
    # Each exchange can hide behind a third of the computation: that of the pass to which it belongs.
    shown_gathers = 2 * _shown(gather, forward, costs.overlap)
    shown_reduce = _shown(reduce, forward, costs.overlap)
    stage = StageCost(
        forward=forward + fixed + tensor + shown_gathers / 2,
        input=forward + again + fixed + tensor * (1 + repeated) + shown_gathers / 2,
        weight=forward + fixed + shown_reduce,
    )
    return Round(
        stage=stage,
        compute=3 * forward + again,
        overhead=3 * fixed,
        tensor=tensor * (2 + repeated),
        gathers=shown_gathers,
        reduction=shown_reduce,
    )


def units(load: Load) -> int:
    """Return how many FSDP units a pipeline rank has: its blocks, and the rest of its stages."""
    return load.blocks + 1


def shard_link(layout: Layout, costs: Costs, slots: int) -> Link:
    """Return the link over which the shards of one copy communicate."""
    return _group_link(layout.shards, layout.tp, costs, slots)


def hop(layout: Layout, profile: ModelProfile, costs: Costs, slots: int) -> float:
    """Return the seconds for an activation to reach the next pipeline rank."""
    if layout.pp == 1:
        return 0.0
    link = costs.inside if layout.world <= slots else costs.between
    return link.latency + profile.boundary / link.bandwidth


def hops(layout: Layout, rounds: int) -> float:
    """Return for how many hops a step waits: while a pipeline fills and drains, and with 1F1B in each turn."""
    ways, schedule = layout.pp - 1, schedule_of(layout)
    if schedule is None:
        return 0.0
    if schedule is Schedule.GPIPE:
        return 2.0 * ways
    if schedule is Schedule.ONE_F_ONE_B:
        return 2.0 * ways * rounds / layout.pp + 2.0 * (layout.pp - 2)
    return (2.0 * layout.virtual + 1.0) * ways


def fill(layout: Layout, slowest: StageCost) -> float:
    """Return the seconds a rank waits while the pipeline fills and drains; slowest: of a rank, over all its stages."""
    ways, v = layout.pp - 1, layout.virtual
    f, i, w = slowest.forward, slowest.input, slowest.weight
    match schedule_of(layout):
        case None:
            return 0.0
        case Schedule.GPIPE | Schedule.ONE_F_ONE_B | Schedule.INTERLEAVED:
            return ways * (f + i + w) / v
        case Schedule.ZERO_BUBBLE | Schedule.DUALPIPE_V:
            return ways * (f + max(0.0, i - w)) / v
        case Schedule.ZBV:
            return ways * max(f, i) / v


def _reduction(own: float, load: Load, layout: Layout, profile: ModelProfile, costs: Costs, slots: int) -> float:
    """Return the seconds of reducing one round's gradients.

    Ordered: an all-to-all within a copy's shards, whose pieces are then added in place, and between copies an
    all-reduce of a shard. The backend's own is done once per step; here its share of a round counts.
    """
    if layout.dp == 1:
        return 0.0
    nbytes = own * profile.gradient_bytes
    whole = _exchange(nbytes, layout.shards, shard_link(layout, costs, slots), units(load))
    if layout.replicas > 1:
        link = _group_link(layout.replicas, layout.tp * layout.shards, costs, slots)
        whole += 2 * _exchange(nbytes / layout.shards, layout.replicas, link, units(load))
    if profile.reduction != "ordered":
        return whole / -(-profile.micro_batches // layout.dp)
    return whole + nbytes * (2 + 1 / layout.shards) / costs.device.memory_bandwidth


def _once(load: Load, layout: Layout, profile: ModelProfile, costs: Costs, slots: int) -> float:
    """Return the seconds of gathering parameters once per step, as ZeRO-1 and 2 do."""
    if layout.dp == 1 or layout.zero == 3:
        return 0.0
    nbytes = held(load, profile, layout) * profile.compute_bytes
    return (1 - costs.overlap) * _exchange(nbytes, layout.shards, shard_link(layout, costs, slots), units(load))


def _update(load: Load, layout: Layout, profile: ModelProfile, costs: Costs) -> float:
    """Return the seconds of the optimizer's step, which reads and writes all state once."""
    each = 2 * profile.held_bytes + profile.gradient_bytes + 2 * profile.optimizer_bytes
    return held(load, profile, layout) / layout.shards * each / costs.device.memory_bandwidth


def _shown(exchange: float, behind: float, overlap: float) -> float:
    """Return the part of an exchange that does not hide behind a computation."""
    return exchange - min(overlap * exchange, behind)


def _group_link(ranks: int, apart: int, costs: Costs, slots: int) -> Link:
    """Return the link of a group of ranks at distances of `apart`; between nodes, those on one node share the load."""
    if ranks * apart <= slots:
        return costs.inside
    members = max(1, slots // apart)
    bandwidth = min(costs.inside.bandwidth, costs.between.bandwidth * members) if members > 1 else None
    return Link(bandwidth=bandwidth or costs.between.bandwidth, latency=costs.between.latency)


def _exchange(nbytes: float, ranks: int, link: Link, messages: int) -> float:
    """Return the seconds of a gather, reduce-scatter or all-to-all of `nbytes` in so many collectives.

    Latency grows with the logarithm of the ranks, as for trees and direct sends.
    """
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * nbytes / link.bandwidth + messages * math.log2(ranks) * link.latency


def _all_reduce(nbytes: float, ranks: int, link: Link) -> float:
    return 2 * _exchange(nbytes, ranks, link, 1)
