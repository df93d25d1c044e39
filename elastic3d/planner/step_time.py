"""Predict the time of one step of a layout, by contributor: pure functions.

Pipelines: the slowest rank computes all its micro-batches, and waits while the pipeline fills and drains. The wait is
(p - 1) passes of a stage for GPipe and 1F1B and of a v times smaller one interleaved (Narayanan et al. 2021, arXiv
2104.04473, section 2.2), and (p - 1)(F + I - W) for zero bubble (Qi et al. 2024, arXiv 2401.10241, section 2.3, ZB-H1).
These are closed forms, because a planner compares thousands of layouts; a test compares them with each timeline.

Communication per device, of n ranks and b bytes: (n - 1) / n * b for a gather or a reduce-scatter, twice that for an
all-reduce (Rajbhandari et al. 2020, arXiv 1910.02054, section 7), and a latency for each collective. Rings and trees
cross between nodes once for all ranks of a node, over all of its links; an all-to-all with m ranks on a node sends
(n - m) / n * b over each rank's own link.
Tensor parallelism all-reduces a block's output twice each way (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.planner.costs import Costs, Link
from elastic3d.planner.extra_rounds import audited
from elastic3d.planner.loads import Load, held, loads, telling
from elastic3d.planner.memory import kept_by, sent_bytes
from elastic3d.planner.passing import passed_on
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
    layout: Layout,
    profile: ModelProfile,
    costs: Costs,
    slots: int,
    speeds: Sequence[float] = (),
    rounds: float | None = None,
) -> dict[str, float]:
    """Return the seconds of one step by contributor, none of them 0. speeds: of each pipeline rank, () if equal.

    rounds: how many micro-batches it takes as long as, where that is not the number each rank computes.
    """
    rounds = profile.rounds(layout.dp, layout.shares) if rounds is None else rounds
    extra, every = audited(layout, profile)
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
        "reduction": rounds * slowest.reduction + _behind(slowest_load, layout, profile, costs, slots),
        "audits": extra / every * slowest.whole,
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
    repeated = 0.0 if profile.recompute == "none" else 1.0
    own, link = held(load, profile, layout), shard_link(layout, costs, slots)
    gather = _exchange(own * profile.compute_bytes, layout.shards, link, units(load)) if layout.zero == 3 else 0.0
    reduce = _reduction(own, load, layout, profile, costs, slots)
    # Each exchange can hide behind a third of the computation: that of the pass to which it belongs.
    shown_gathers = 2 * _shown(gather, forward, costs.overlap)
    shown_reduce = _shown(reduce, forward, costs.overlap) / profile.leaf + _adding(own, layout, profile, costs)
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


def hops(layout: Layout, rounds: float) -> float:
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
    """Return the seconds of reducing one leaf's gradients; what is done once a step counts with its share of a leaf.

    Ordered: an all-to-all among all data-parallel ranks, whose pieces are then added in place, and with replicas once a
    step an exchange of the parts of each shard; or an all-to-all within each replica, beside which a sum of each shard
    goes on to the next replica, and once a step to all of them (`parallel/reduction/ordered.py` counts the bytes).
    Pieces are sent as they were computed or, where the weights have a pass of their own or a leaf has several
    micro-batches, as they were added up. The backend's own: a reduce-scatter among the shards, once a step with ZeRO-1
    and else for each micro-batch, and between replicas an all-reduce of a shard once a step. In memory each piece is
    read where it was computed, written flat and read again, and a sum is read and written where it is added to; one
    that goes on is read and written once more.
    """
    if layout.dp == 1:
        return 0.0
    rounds = profile.rounds(layout.dp, layout.shares) // profile.leaf
    nbytes, memory = own * profile.gradient_bytes, costs.device.memory_bandwidth
    apart = _apart(layout, costs, slots)
    between = _exchange(nbytes / layout.shards, layout.replicas, apart, units(load))
    if profile.reduction != "ordered":
        scatter = _exchange(nbytes, layout.shards, shard_link(layout, costs, slots), units(load))
        scatter += (own * profile.compute_bytes + 2 * nbytes) / memory
        return scatter / (rounds if layout.zero == 1 else 1) + 2 * between / rounds
    sent = own * sent_bytes(layout, profile)
    if passed_on(layout):
        within = _all_to_all(sent, layout.shards, layout.tp, units(load), costs, slots)
        on = nbytes / layout.shards / apart.bandwidth + units(load) * apart.latency
        return max(within, on) + on / rounds + (3 * sent + 4 * nbytes / layout.shards) / memory
    exchange = _all_to_all(sent, layout.dp, layout.tp, units(load), costs, slots)
    return exchange + between / rounds + (3 * sent + 2 * nbytes / layout.dp) / memory


def _behind(load: Load, layout: Layout, profile: ModelProfile, costs: Costs, slots: int) -> float:
    """Return the seconds, once a step, by which the last replica runs behind the first where sums go on."""
    if profile.reduction != "ordered" or not passed_on(layout):
        return 0.0
    apart = _apart(layout, costs, slots)
    nbytes = held(load, profile, layout) * profile.gradient_bytes / units(load)
    return (layout.replicas - 1) * (nbytes / layout.shards / apart.bandwidth + apart.latency)


def _apart(layout: Layout, costs: Costs, slots: int) -> Link:
    """Return the link between the ranks of one place in all replicas."""
    return _group_link(layout.replicas, layout.tp * layout.shards, costs, slots)


def _adding(own: float, layout: Layout, profile: ModelProfile, costs: Costs) -> float:
    """Return the seconds, for each micro-batch, of adding gradients up where they are computed.

    Those of a leaf; or of a step, where the backend sums them once in it.
    """
    together = profile.leaf
    if profile.reduction != "ordered" and layout.zero == 1 and layout.dp > 1:
        together = profile.rounds(layout.dp, layout.shares)
    each = 2 * profile.gradient_bytes + profile.compute_bytes
    return (1 - 1 / together) * own * each / costs.device.memory_bandwidth


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


def _all_to_all(nbytes: float, ranks: int, apart: int, messages: int, costs: Costs, slots: int) -> float:
    """Return the seconds of an all-to-all of `nbytes` a rank, in so many collectives; ranks: at distances of `apart`.

    Nothing is added up on the way: a rank sends its own piece to each other rank, over its own link to the other nodes
    where that rank is on one of them. A reduce-scatter crosses between two nodes once for all the ranks of a node.
    """
    near = min(ranks, max(1, slots // apart))
    inside = (near - 1) / ranks * nbytes / costs.inside.bandwidth
    between = (ranks - near) / ranks * nbytes / costs.between.bandwidth
    return max(inside, between) + _latency(ranks, costs.inside if near == ranks else costs.between, messages)


def _exchange(nbytes: float, ranks: int, link: Link, messages: int) -> float:
    """Return the seconds of a gather or reduce-scatter of `nbytes` in so many collectives."""
    if ranks == 1:
        return 0.0
    return (ranks - 1) / ranks * nbytes / link.bandwidth + _latency(ranks, link, messages)


def _latency(ranks: int, link: Link, messages: int) -> float:
    """Return the latency of so many collectives: it grows with the logarithm of the ranks, as for trees and sends."""
    return messages * math.log2(ranks) * link.latency


def _all_reduce(nbytes: float, ranks: int, link: Link) -> float:
    return 2 * _exchange(nbytes, ranks, link, 1)
