"""Rank all layouts of a cluster by predicted time, and say why others do not work."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from elastic3d.planner.costs import Costs
from elastic3d.planner.enumeration import Cluster, options
from elastic3d.planner.legality import unfit
from elastic3d.planner.memory import memory
from elastic3d.planner.paced import share_out, shared_rounds, stage_speeds
from elastic3d.planner.results import Candidate, Ranking, RejectedLayout
from elastic3d.planner.schedules import best_share, cuts
from elastic3d.planner.step_time import seconds
from elastic3d.values import Layout, ModelProfile

BALANCED = 64
"""Most shapes of pipelines that are cut anew by cost: those that this can make the fastest, most promising first; and
most layouts whose micro-batches are shared out anew."""

PipelineShape = tuple[int, int, bool, int, tuple[float, ...]]
"""What the cuts of a layout depend on: its pipeline ranks, their stages and whether these fold, tp, ranks' speeds."""


def rank(
    nodes: int,
    slots: int,
    profile: ModelProfile,
    request: Layout,
    costs: Costs,
    *,
    speeds: Sequence[float] = (),
    counts: Collection[int] | None = None,
) -> Ranking:
    """Return the layouts for up to `nodes` nodes of `slots` slots each, the fastest first.

    In `request`, pp, dp, tp, zero and replicas of 0 are free, and so are a schedule of None and, if a schedule is free
    or has several stages per rank, virtual=1. speeds: of each node in rank order, 1 for one as fast as `costs` say; ()
    for equal ones. counts: the numbers of nodes that may be used, None for any. Layouts of equal time are ordered by
    nodes, then by bytes.
    """
    cluster = Cluster(nodes=nodes, slots=slots, counts=counts)
    candidates: list[Candidate] = []
    rejected: list[RejectedLayout] = []
    for layout in options(cluster, profile, request):
        judged = judge(layout, cluster, profile, costs, speeds)
        if isinstance(judged, Candidate):
            candidates.append(judged)
        elif judged.nodes == nodes or judged.out_of_memory:
            rejected.append(judged)
    candidates.sort(key=_order)
    balanced: list[Candidate] = []
    if candidates and not request.cuts:
        fastest = candidates[0].seconds
        shapes = [_shape(one.layout, cluster, speeds) for one in candidates]
        layouts = {shape: one.layout for shape, one in zip(shapes, candidates, strict=True)}
        shares = {shape: _share(shape, layout, profile, costs) for shape, layout in layouts.items()}
        made: dict[PipelineShape, tuple[int, ...]] = {}
        # A lower bound of each candidate's seconds, whatever its cuts.
        for hope, at in sorted((one.seconds * shares[shapes[at]], at) for at, one in enumerate(candidates)):
            if hope >= fastest:
                break
            one, shape = candidates[at], shapes[at]
            if shape not in made:
                if len(made) == BALANCED:
                    break
                made[shape] = _cuts(shape, one.layout, profile, costs)
            if not made[shape]:
                continue
            better = judge(replace(one.layout, cuts=made[shape]), cluster, profile, costs, speeds)
            if isinstance(better, Candidate) and better.seconds < one.seconds:
                balanced.append(better)
                fastest = min(fastest, better.seconds)
    if len(set(speeds)) > 1:
        balanced += _shared(candidates, cluster, profile, costs, speeds)
    return Ranking(ranking=tuple(sorted([*candidates, *balanced], key=_order)), rejected=tuple(rejected))


def judge(
    layout: Layout, cluster: Cluster, profile: ModelProfile, costs: Costs, speeds: Sequence[float] = ()
) -> Candidate | RejectedLayout:
    """Return the prediction for one layout, or why it does not work."""
    used = layout.world // cluster.slots
    reason = illegal(layout, cluster, profile)
    if reason is not None:
        return RejectedLayout(layout=layout, nodes=used, reason=reason)
    needed = memory(layout, profile, costs.device.reserve)
    total = sum(needed.values())
    if total > costs.device.memory:
        return RejectedLayout(
            layout=layout, nodes=used, reason=_too_large(needed, total, costs.device.memory), out_of_memory=True
        )
    by_stage = stage_speeds(layout, cluster.slots, speeds)
    shared = shared_rounds(layout, profile, cluster.slots, speeds)
    time = seconds(layout, profile, costs, cluster.slots, by_stage, shared)
    return Candidate(
        layout=layout,
        nodes=used,
        spares=cluster.nodes - used,
        micro_batches=profile.rounds(layout.dp, layout.shares),
        seconds=sum(time.values()),
        memory_bytes=total,
        memory=needed,
        time=time,
    )


def illegal(layout: Layout, cluster: Cluster, profile: ModelProfile) -> str | None:
    """Return why a layout cannot run on the cluster's nodes, whatever it costs; None if it can."""
    if layout.world > cluster.devices or layout.world % cluster.slots:
        return f"{layout} is {layout.world} ranks, not a whole number of the {cluster.nodes} nodes x {cluster.slots}"
    if not cluster.allows(layout.world // cluster.slots):
        return f"{layout} uses {layout.world // cluster.slots} node(s), which is not a number that is allowed"
    if layout.cp > 1 and cluster.slots % (layout.cp * layout.tp):
        sizes = f"cp={layout.cp}" if layout.tp == 1 else f"cp={layout.cp} x tp={layout.tp}"
        return f"{sizes} does not divide the {cluster.slots} slots of a node, and cp stays inside one"
    if cluster.slots % layout.tp:
        return f"tp={layout.tp} does not divide the {cluster.slots} slots of a node, and tp stays inside one"
    return unfit(layout, profile)


def _shape(layout: Layout, cluster: Cluster, speeds: Sequence[float]) -> PipelineShape:
    folds = layout.schedule is not None and layout.schedule.folds
    return layout.pp, layout.virtual, folds, layout.tp, stage_speeds(layout, cluster.slots, speeds)


def _share(shape: PipelineShape, layout: Layout, profile: ModelProfile, costs: Costs) -> float:
    """Return the least share of a candidate's seconds that cutting its stages by cost can leave."""
    if _whole(layout, profile):
        return 1.0
    first, last, block = _work(layout, profile, costs)
    return best_share(layout, blocks=profile.blocks, block=block, first=first, last=last, speeds=shape[-1])


def _cuts(shape: PipelineShape, layout: Layout, profile: ModelProfile, costs: Costs) -> tuple[int, ...]:
    """Return the cuts by cost of a layout's stages; () where even ones are as good."""
    first, last, block = _work(layout, profile, costs)
    return cuts([block] * profile.blocks, layout, first=first, last=last, speeds=shape[-1])


def _shared(
    candidates: Sequence[Candidate], cluster: Cluster, profile: ModelProfile, costs: Costs, speeds: Sequence[float]
) -> Iterator[Candidate]:
    """Yield candidates with unequal shares, where that is faster and fits; of the first few that may have any."""
    made = ((one, share_out(one.layout, profile, cluster.slots, speeds)) for one in candidates)
    for one, layout in islice(((one, layout) for one, layout in made if layout is not None), BALANCED):
        better = judge(layout, cluster, profile, costs, speeds)
        if isinstance(better, Candidate) and better.seconds < one.seconds:
            yield better


def _whole(layout: Layout, profile: ModelProfile) -> bool:
    return layout.pp == 1 or profile.blocks > 256


def _work(layout: Layout, profile: ModelProfile, costs: Costs) -> tuple[float, float, float]:
    """Return the work of a micro-batch: before the blocks, after them, and of one block."""
    fixed = 3 * costs.forward * costs.device.flops * layout.tp / max(1, profile.blocks // layout.stages)
    return 3 * profile.first.flops, 3 * profile.last.flops, 3 * profile.block.flops + fixed


def _order(one: Candidate) -> tuple[float, int, int, str]:
    return one.seconds, one.nodes, one.memory_bytes, one.layout.request()


def _too_large(needed: dict[str, int], total: int, there: int) -> str:
    largest = sorted(needed.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {_gib(nbytes)}" for name, nbytes in largest)
    return f"needs {_gib(total)} of {_gib(there)} on the fullest device: {named}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
