"""The layouts among which a cluster, a model and a request leave a choice: pure, and in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elastic3d.planner.schedules import VIRTUAL
from elastic3d.values import Layout, ModelProfile, Schedule

MANY = 16
"""Nodes beyond which not all sizes are considered: for each pp and tp only the largest dp for a few numbers of rounds,
and only meshes that have a round for each stage and whose slowest rank computes at most twice as long as the best
one's."""

WIDTHS = (2, 3, 4, 6, 8)
"""Stages per rank that are tried if a schedule takes several and none are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and the slots that each has. counts: the numbers of nodes that may be used, None for any."""

    nodes: int
    slots: int
    counts: Collection[int] | None = None

    @property
    def devices(self) -> int:
        """Number of slots in all."""
        return self.nodes * self.slots

    def allows(self, nodes: int) -> bool:
        """Return whether so many nodes may be used."""
        return self.counts is None or nodes in self.counts


def options(cluster: Cluster, profile: ModelProfile, request: Layout) -> Iterator[Layout]:
    """Yield the layouts in question, each of a whole number of nodes; some of them cannot run."""
    for pp, dp, cp, tp in _meshes(cluster, profile, request):
        if request.shares and pp > 1:
            continue
        for zero in _stages(dp * cp, request):
            for replicas in _replicas(dp, cp * tp, cluster.slots, request) if cp == 1 else (max(1, request.replicas),):
                for schedule, virtual in _schedules(pp, profile.blocks, request):
                    yield Layout(
                        pp=pp,
                        dp=dp,
                        tp=tp,
                        cp=cp,
                        zero=zero,
                        replicas=replicas,
                        schedule=schedule,
                        virtual=virtual,
                        cuts=request.cuts if pp > 1 else (),
                        shares=request.shares,
                    )


def tensor_sizes(slots: int, profile: ModelProfile, request: Layout) -> list[int]:
    """Return the sizes of tp: the one asked for, or all that divide slots and heads."""
    if request.tp:
        return [request.tp]
    common = math.gcd(slots, profile.heads) if profile.heads else 1
    return [size for size in range(1, common + 1) if common % size == 0]


def context_sizes(slots: int, tp: int, profile: ModelProfile, request: Layout) -> list[int]:
    """Return the sizes of cp: the one asked for, or all that divide the chunks of a sequence and what tp leaves."""
    if request.cp:
        return [request.cp]
    common = math.gcd(slots // tp, profile.chunks)
    return [size for size in range(1, common + 1) if common % size == 0]


def _meshes(cluster: Cluster, profile: ModelProfile, request: Layout) -> list[tuple[int, int, int, int]]:
    meshes: list[tuple[float, tuple[int, int, int, int]]] = []
    inner = [
        (cp, tp)
        for tp in tensor_sizes(cluster.slots, profile, request)
        for cp in context_sizes(cluster.slots, tp, profile, request)
    ]
    for cp, tp in inner:
        most = min(max(1, profile.blocks), cluster.devices // (cp * tp))
        for pp in [request.pp] if request.pp else range(1, most + 1):
            slowest = -(-profile.blocks // pp) / (cp * tp)
            for dp in _replications(pp, cp * tp, cluster, profile, request):
                meshes.append((profile.rounds(dp) * slowest, (pp, dp, cp, tp)))
    if cluster.nodes > MANY:
        meshes = [one for one in meshes if profile.rounds(one[1][1]) >= one[1][0]]
        best = min(meshes, default=(0.0,))[0]
        meshes = [one for one in meshes if one[0] <= 2 * best]
    return [mesh for _, mesh in meshes]


def _replications(pp: int, width: int, cluster: Cluster, profile: ModelProfile, request: Layout) -> list[int]:
    """Return the sizes of dp that use whole nodes and leave no rank without a leaf, the largest first.

    width: how many ranks compute a micro-batch of a stage together.
    """
    step = cluster.slots // math.gcd(cluster.slots, pp * width)
    most = min(profile.leaves, cluster.devices // (pp * width))
    if request.dp and (request.dp % step or request.dp > most):
        return []
    every = [request.dp] if request.dp else range(most // step * step, 0, -step)
    sizes = [dp for dp in every if cluster.allows(pp * width * dp // cluster.slots)]
    if request.dp or cluster.nodes <= MANY:
        return sizes
    chosen: dict[int, int] = {}
    for dp in sizes:
        rounds = profile.rounds(dp)
        if rounds not in chosen and len(chosen) == 3:
            break
        # Of equal rounds the fewest nodes, but the largest dp of all is kept for the sake of memory.
        chosen[rounds if chosen else -1] = dp
    return list(dict.fromkeys(chosen.values()))


def _stages(ranks: int, request: Layout) -> tuple[int, ...]:
    if request.zero:
        return (request.zero,)
    if request.shares:
        return (1, 2)
    return (1, 2, 3) if ranks > 1 else (2,)


def _replicas(dp: int, tp: int, slots: int, request: Layout) -> tuple[int, ...]:
    """Return numbers of copies: one and, if that is free, one in each node."""
    if request.replicas:
        return (request.replicas,) if dp % request.replicas == 0 else ()
    copies = dp * tp // slots if (dp * tp) % slots == 0 and slots % tp == 0 else 1
    return (1, copies) if 1 < copies < dp else (1,)


def _schedules(pp: int, blocks: int, request: Layout) -> list[tuple[Schedule | None, int]]:
    if pp == 1:
        return [(None, 1)]
    schedules: list[tuple[Schedule | None, int]] = []
    for schedule in [request.schedule] if request.schedule else Schedule:
        least, most = VIRTUAL[schedule]
        if request.virtual != 1 or least == most:
            schedules.append((schedule, request.virtual if request.virtual != 1 else least))
        else:
            schedules += [(schedule, width) for width in WIDTHS if width == least or pp * width <= blocks]
    return schedules
