"""Choose a layout where memory ran out before: one that is predicted to need less than what did not fit. Pure.

How far the predictions are off is not known, but which of two layouts needs less is what they are good for. So what was
learned bounds the prediction (`MemoryBound.most`), whatever the device has; where the costs of the device are known,
that is a reserve of so many bytes which the model cannot use, and it is passed on as one.

What blocks compute again is chosen with the layout, from what the script asks for upwards, as far as it was measured:
in part only where that keeps less than all, which a block of little but products with weights does not.
With costs the fastest of all that fit is taken: leaner schedules, higher ZeRO stages, more stages and more computed
again all cost time, and which of them costs least depends on the machines. Without costs the order is that of what is
changed: the mesh as it is, with more computed again, then other meshes. Bits are the same in all of them.

Where nothing stays below the bound, the leanest there is is taken, and the plan says so: the bound is a guess, and a
job that has lost nodes since had better try than wait for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from elastic3d.errors import LayoutError
from elastic3d.planner.choice import Plan, legal_layouts, plan
from elastic3d.planner.costs import Costs
from elastic3d.planner.enumeration import Cluster
from elastic3d.planner.legality import unfit
from elastic3d.planner.memory import memory
from elastic3d.planner.ranking import judge, rank
from elastic3d.planner.results import Candidate
from elastic3d.shortfall import RECOMPUTED, MemoryBound
from elastic3d.values import Layout, ModelProfile


def needed(layout: Layout, profile: ModelProfile, recompute: str) -> int:
    """Return the bytes that the fullest rank is predicted to need, without what is lost from the start."""
    return sum(memory(layout, replace(profile, recompute=recompute)).values())


def kinds(profile: ModelProfile) -> tuple[str, ...]:
    """Return what blocks may compute again: what the script asks for, and what is known to keep less."""
    asked = profile.recompute
    more = RECOMPUTED[RECOMPUTED.index(asked) + 1 :]
    return (asked, *(kind for kind in more if kind in profile.block.kept))


def plan_below(
    bound: MemoryBound,
    nodes: int,
    slots: int,
    profile: ModelProfile,
    request: Layout,
    *,
    previous: Layout | None = None,
    costs: Costs | None = None,
    speeds: Sequence[float] = (),
    counts: Collection[int] | None = None,
) -> Plan:
    """Return the best plan that is predicted to stay below a bound, else the leanest, with `fits` False.

    The arguments are those of `plan`. Raises LayoutError where that does, whatever blocks compute again.
    """
    if previous is not None and request.tp in (0, previous.tp):
        request = replace(request, tp=previous.tp)
    cluster = Cluster(nodes=nodes, slots=slots, counts=counts)
    if costs is None or not profile.block.flops:
        return _by_shape(bound, cluster, profile, request, previous, speeds)
    return _by_time(bound, cluster, profile, request, previous, costs, speeds)


def _by_time(
    bound: MemoryBound,
    cluster: Cluster,
    profile: ModelProfile,
    request: Layout,
    previous: Layout | None,
    costs: Costs,
    speeds: Sequence[float],
) -> Plan:
    nodes, slots, counts, device = cluster.nodes, cluster.slots, cluster.counts, costs.device
    tight = replace(costs, device=replace(device, reserve=max(device.reserve, device.memory - bound.most)))
    fitting: list[tuple[float, Plan]] = []
    for kind in kinds(profile):
        changed = replace(profile, recompute=kind)
        try:
            made = plan(nodes, slots, changed, request, previous=previous, costs=tight, speeds=speeds, counts=counts)
        except LayoutError:
            continue
        judged = judge(made.layout, cluster, changed, tight, speeds)
        if isinstance(judged, Candidate):
            size = needed(made.layout, profile, kind)
            fitting.append((judged.seconds, replace(made, recompute=kind, needed=size)))
    if fitting:
        return min(fitting, key=lambda one: one[0])[1]
    for kind in reversed(kinds(profile)):
        changed = replace(profile, recompute=kind)
        ranked = rank(nodes, slots, changed, request, costs, speeds=speeds, counts=counts)
        if ranked.ranking:
            leanest = min(ranked.ranking, key=lambda one: (one.memory_bytes, one.seconds))
            size = needed(leanest.layout, profile, kind)
            return Plan(layout=leanest.layout, nodes=leanest.nodes, recompute=kind, needed=size, fits=False)
    # Nothing works, and `plan` says why.
    return plan(nodes, slots, profile, request, previous=previous, costs=costs, speeds=speeds, counts=counts)


def _by_shape(
    bound: MemoryBound,
    cluster: Cluster,
    profile: ModelProfile,
    request: Layout,
    previous: Layout | None,
    speeds: Sequence[float],
) -> Plan:
    slots = cluster.slots
    leanest: tuple[int, int, Layout, str] | None = None
    whole = slots % ((request.cp or 1) * (request.tp or 1)) == 0
    for used in filter(cluster.allows, range(cluster.nodes, 0, -1)) if whole else ():
        for layout, kind in _rungs(used * slots, profile, request):
            size = needed(layout, profile, kind)
            if size <= bound.most:
                return _made(bound, used, slots, replace(profile, recompute=kind), layout, previous, speeds)
            if leanest is None or size < leanest[0]:
                leanest = (size, used, layout, kind)
    if leanest is not None:
        _, used, layout, kind = leanest
        return _made(bound, used, slots, replace(profile, recompute=kind), layout, previous, speeds)
    # Nothing is legal, and `plan` says why.
    return plan(cluster.nodes, slots, profile, request, previous=previous, speeds=speeds, counts=cluster.counts)


def _rungs(world: int, profile: ModelProfile, request: Layout) -> Iterator[tuple[Layout, str]]:
    """Yield the layouts of so many ranks, the best by shape first, each with more and more computed again."""
    seen: dict[Layout, None] = {}
    for kind in kinds(profile):
        seen.update(dict.fromkeys(legal_layouts(world, replace(profile, recompute=kind), request)))
    for layout in sorted(seen, key=lambda layout: (layout.pp + layout.dp, -layout.dp)):
        for kind in kinds(profile):
            if unfit(layout, replace(profile, recompute=kind)) is None:
                yield layout, kind


def _made(
    bound: MemoryBound,
    used: int,
    slots: int,
    profile: ModelProfile,
    layout: Layout,
    previous: Layout | None,
    speeds: Sequence[float],
) -> Plan:
    """Return the plan of a layout, with stages cut for the nodes' speeds where that still fits."""
    made = plan(used, slots, profile, layout, previous=previous, speeds=speeds)
    size = needed(made.layout, profile, profile.recompute)
    if made.layout != layout and size > max(bound.most, needed(layout, profile, profile.recompute)):
        made = replace(made, layout=layout)
        size = needed(layout, profile, profile.recompute)
    return replace(made, recompute=profile.recompute, needed=size, fits=size <= bound.most)
