"""Choose a layout for a number of nodes: a pure function, so that every trainer can verify it by computing it again.

If the costs of the model and the machines are known, the layout with the shortest predicted step is chosen, and kept
until a change pays for itself. If not, the planner takes as many nodes as any legal layout can use, and among layouts
of equal size the one with the smallest pp + dp: a step's bubble grows with pp - 1 and its gradient exchange with
dp - 1, so the squarest mesh bounds both. On a tie the larger dp wins, whose pipeline is shorter.

Nodes may differ in speed. A stage with a slow node then gets fewer blocks and, where there are no stages, a slow node
fewer micro-batches, whichever way the layout was chosen.

The same bits are promised for one size of tp, so tp does not change once a run has chosen it. Those of cp may change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from elastic3d.errors import LayoutError
from elastic3d.planner.costs import Costs
from elastic3d.planner.enumeration import Cluster
from elastic3d.planner.legality import unfit
from elastic3d.planner.paced import block_work, share_out, stage_speeds, step_seconds
from elastic3d.planner.ranking import judge, rank
from elastic3d.planner.results import Candidate
from elastic3d.planner.schedules import VIRTUAL, cuts
from elastic3d.values import Layout, ModelProfile

SHOWN = 3
"""Most reasons that an error names."""

LOOKED_AT = 1000
"""Most layouts that are checked for them."""


RECUT = 256
"""Most blocks of a model whose stages are cut for speeds where no costs are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout and how many nodes it uses; the others stay spares.

    seconds: the predicted time of its step, kept: that of the previous layout. Both are 0.0 where no speeds were given,
    or nothing can be said, and in an arbitrary unit where no costs are known.
    recompute: what blocks are to compute again, "" for what the script says; needed: bytes that the fullest rank is
    predicted to need; fits: they are within the bound. The three are of `plan_below`.
    """

    layout: Layout
    nodes: int
    seconds: float = field(default=0.0, compare=False)
    kept: float = field(default=0.0, compare=False)
    recompute: str = field(default="", compare=False)
    needed: int = field(default=0, compare=False)
    fits: bool = field(default=True, compare=False)


def legal_layouts(world: int, profile: ModelProfile, request: Layout) -> list[Layout]:
    """Return the layouts of exactly `world` ranks that the model and the request allow, best first by shape alone.

    Whatever else is free is chosen as simply as possible: cp and tp 1, ZeRO-3 or what the schedule needs, 1F1B.
    """
    layouts = [layout for layout in _asked_for(world, request) if unfit(layout, profile) is None]
    return sorted(layouts, key=lambda layout: (layout.pp + layout.dp, -layout.dp))


def _asked_for(world: int, request: Layout) -> Iterator[Layout]:
    """Yield the layouts of exactly `world` ranks that the request allows, whatever the model."""
    tp, cp = request.tp or 1, request.cp or 1
    for pp in range(1, world // (cp * tp) + 1):
        if world % (pp * cp * tp) or (request.pp and pp != request.pp) or (request.shares and pp > 1):
            continue
        dp = world // (pp * cp * tp)
        if (request.dp and dp != request.dp) or dp % max(1, request.replicas):
            continue
        yield _simple(pp, dp, cp, tp, request)


def plan(
    nodes: int,
    slots: int,
    profile: ModelProfile,
    request: Layout,
    *,
    previous: Layout | None = None,
    costs: Costs | None = None,
    expected_change_s: float = float("inf"),
    speeds: Sequence[float] = (),
    counts: Collection[int] | None = None,
) -> Plan:
    """Return the best plan for `nodes` nodes of `slots` slots each.

    previous: the layout the run has now, kept unless another saves more than `costs.change` seconds until the next
    change of membership, which is expected in `expected_change_s`; its tp is kept in any case. costs: without them, and
    for a profile without FLOPs, layouts are chosen by shape alone. speeds: of each node in rank order, as for `rank`:
    1 / rho for one whose work takes rho times as long, 1.0 for any other; () for nodes that are alike. counts: the
    numbers of nodes that may be used, None for any.
    Raises LayoutError, saying what would work, if no such number up to `nodes` has a legal layout that fits.
    """
    if previous is not None and request.tp not in (0, previous.tp):
        raise LayoutError(
            f"this run computes with tp={previous.tp}, and other sizes give other bits: ask for tp={previous.tp}, or "
            "start a new run from its checkpoint"
        )
    if previous is not None:
        request = replace(request, tp=previous.tp)
        if not speeds and not request.shares:
            # They were for nodes that were slow, and none is.
            previous = replace(previous, shares=())
    cluster = Cluster(nodes=nodes, slots=slots, counts=counts)
    if costs is None or not profile.block.flops:
        return _timed(_by_shape(cluster, profile, request, speeds), previous, profile, request, slots, speeds)
    ranked = rank(nodes, slots, profile, request, costs, speeds=speeds, counts=counts)
    if not ranked.ranking:
        reasons = [one.reason for one in ranked.rejected]
        more = any(one.out_of_memory for one in ranked.rejected)
        raise LayoutError(_nothing(nodes, slots, profile, request, reasons, more_nodes_help=more))
    best = ranked.ranking[0]
    if previous is not None and _within(previous, request):
        present = judge(previous, cluster, profile, costs, speeds)
        if isinstance(present, Candidate) and not _pays(present, best, costs, expected_change_s):
            best = present
    made = Plan(layout=best.layout, nodes=best.nodes)
    return _timed(made, previous, profile, request, slots, speeds, costs)


def _timed(
    made: Plan,
    previous: Layout | None,
    profile: ModelProfile,
    request: Layout,
    slots: int,
    speeds: Sequence[float],
    costs: Costs | None = None,
) -> Plan:
    """Return a plan with its predictions, or one that keeps the previous layout where that is as fast after all."""
    if not speeds:
        return made
    made = replace(made, seconds=step_seconds(made.layout, profile, slots, speeds, costs))
    if previous is None or previous.world > len(speeds) * slots or _illegal_on(previous, slots, profile):
        return made
    made = replace(made, kept=step_seconds(previous, profile, slots, speeds, costs))
    if made.kept <= made.seconds and previous.world == made.nodes * slots and _within(previous, request):
        return replace(made, layout=previous, seconds=made.kept)
    return made


def _illegal_on(layout: Layout, slots: int, profile: ModelProfile) -> bool:
    """Return whether a layout cannot run on nodes of so many slots, however many there are."""
    return layout.world % slots != 0 or slots % (layout.cp * layout.tp) != 0 or unfit(layout, profile) is not None


def _pays(present: Candidate, best: Candidate, costs: Costs, expected_change_s: float) -> bool:
    """Return whether the better layout saves more time until the next change than the change costs."""
    return (1.0 - best.seconds / present.seconds) * expected_change_s > costs.change


def _within(layout: Layout, request: Layout) -> bool:
    """Return whether the request allows a layout."""
    sizes = all(
        getattr(request, axis) in (0, getattr(layout, axis)) for axis in ("pp", "dp", "cp", "tp", "zero", "replicas")
    )
    uneven = all(getattr(request, name) in ((), getattr(layout, name)) for name in ("cuts", "shares"))
    return sizes and uneven and request.schedule in (None, layout.schedule)


def _by_shape(cluster: Cluster, profile: ModelProfile, request: Layout, speeds: Sequence[float]) -> Plan:
    nodes, slots = cluster.nodes, cluster.slots
    if slots % ((request.cp or 1) * (request.tp or 1)) == 0:
        for used in filter(cluster.allows, range(nodes, 0, -1)):
            layouts = legal_layouts(used * slots, profile, request)
            if layouts:
                return Plan(layout=_cut_for(speeds, layouts[0], slots, profile, request), nodes=used)
    else:
        # Whatever else is wrong with other sizes, these ranks share a node.
        raise LayoutError(_nothing(nodes, slots, profile, request, []))
    worlds = [used * slots for used in range(nodes, 0, -1)]
    asked = (layout for world in worlds for layout in _asked_for(world, request))
    # If the sizes would do, the reason is something else, of the model or the schedule, which more nodes do not change.
    freed = replace(profile, heads=request.tp or 1, chunks=1, compress="", recompute="none")
    sizes = replace(freed, tied=False, unstaged="", experts=0)
    fitting = (layout for layout in islice(asked, LOOKED_AT) if unfit(_plainest(layout), sizes) is None)
    reasons = [why for layout in fitting if (why := unfit(layout, profile)) is not None]
    raise LayoutError(_nothing(nodes, slots, profile, request, reasons))


def _plainest(layout: Layout) -> Layout:
    """Return the layout of the same pp, dp and tp that asks for the least."""
    return replace(layout, cp=1, schedule=None, virtual=1, cuts=())


def _cut_for(speeds: Sequence[float], layout: Layout, slots: int, profile: ModelProfile, request: Layout) -> Layout:
    """Return the layout with stages cut or micro-batches shared out for the speeds of its nodes, if that is faster."""
    alike = len(set(speeds[: layout.world // slots])) < 2
    if alike or request.cuts or request.shares or profile.blocks > RECUT:
        return layout
    if layout.pp == 1:
        return share_out(layout, profile, slots, speeds) or layout
    first, block, last = block_work(profile)
    there = stage_speeds(layout, slots, speeds)
    recut = replace(layout, cuts=cuts([block] * profile.blocks, layout, first=first, last=last, speeds=there))
    if not recut.cuts or unfit(recut, profile) is not None:
        return layout
    faster = step_seconds(recut, profile, slots, speeds) < step_seconds(layout, profile, slots, speeds)
    return recut if faster else layout


def _simple(pp: int, dp: int, cp: int, tp: int, request: Layout) -> Layout:
    """Return a layout of these sizes, the rest as requested."""
    schedule, virtual = (request.schedule, request.virtual) if pp > 1 else (None, 1)
    if schedule is not None and virtual == 1:
        virtual = VIRTUAL[schedule][0]
    splits = schedule is not None and schedule.splits_backward
    return Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        cp=cp,
        zero=request.zero or (2 if splits or request.shares else 3),
        replicas=max(1, request.replicas),
        schedule=schedule,
        virtual=virtual,
        cuts=request.cuts if pp > 1 else (),
        shares=request.shares,
    )


def _nothing(
    nodes: int, slots: int, profile: ModelProfile, request: Layout, reasons: list[str], *, more_nodes_help: bool = False
) -> str:
    leaves = f" in leaves of {profile.leaf}" if profile.leaf > 1 else ""
    head = (
        f"no layout fits {nodes} node(s) x {slots} slot(s) with {profile.blocks} blocks and {profile.micro_batches} "
        f"micro-batches per step{leaves} (asked for: {request.request()})"
    )
    several = list(dict.fromkeys(reasons))
    if several and not more_nodes_help:
        more = f", and {len(several) - SHOWN} more reasons; `elastic3d plan` shows all" if len(several) > SHOWN else ""
        return f"{head}: {'; '.join(several[:SHOWN])}{more}"
    why = f"; the nearest: {several[0]}" if several else ""
    inner = [axis for axis, size in (("cp", request.cp), ("tp", request.tp)) if size != 1]
    sizes, within = " x ".join(["pp", "dp", *inner]), "and "
    if inner:
        within = f"{' x '.join(inner)} must divide the slots, and "
    return (
        f"{head}{why}; pp may be at most the number of blocks and of micro-batch "
        f"rounds, {within}{sizes} must be a whole number of nodes: free an axis, add nodes, or raise global_batch"
    )
