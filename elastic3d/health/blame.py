"""What a slow node costs, and whose connection is slow: a step as its ranks made it, played again without. Pure.

The planner's timeline says when each pass of a pipeline would run if every rank took what its sheet says; with one
node's times divided by how slow it is, the difference is what it costs. Waits take no part in it.

How long a transfer takes shows without any clock that ranks share. Of ranks that meet, the last one waits only for the
transfer: it is the least of their waits. Of a pipeline, too, beyond what each rank is idle where the same passes are
played without transfers: with ZeRO-3 ranks meet their peers in every pass, and where one column has a slow connection
the ranks of all others wait for peers, and those of other stages for them. A connection is slow if its endpoint is
common to all slow groups, and no other group is slow: a network that is slow for everybody, or a busy machine, names
nobody. Its groups are late by as much as they exchange, which differs: the least late one says that it is this node,
and the latest one how much it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from elastic3d.health.sheet import StepSheet
from elastic3d.planner.placement import place_of
from elastic3d.planner.schedules import rank_of_stage
from elastic3d.planner.timeline import ScheduledAction, StageCost, play
from elastic3d.values import Layout

LOPSIDED = 8.0
"""How many times as late as the least late of a node's groups, beyond others, its connection is at most."""

TURNS = 4
"""Most turns of a pipeline that are played; longer steps go on like these."""


def seconds_lost(layout: Layout, sheets: Sequence[StepSheet], slow: Mapping[int, float]) -> float:
    """Return how many seconds of a step it costs that ranks are slow. slow: how many times as long they take."""
    return max(0.0, _span(layout, sheets, {}) - _span(layout, sheets, slow))


Group = tuple[int, ...]
"""Ranks that exchange with each other."""


def transfers(layout: Layout, sheets: Sequence[StepSheet]) -> dict[Group, float]:
    """Return the seconds of a step that transfers take, of each group of data-parallel peers and each pipeline."""
    meeting: dict[tuple[str, int, int, int], list[int]] = {}
    for rank in range(len(sheets)):
        place = place_of(rank, layout)
        meeting.setdefault(("dp", place.pp, place.cp, place.tp), []).append(rank)
        meeting.setdefault(("pp", place.dp, place.cp, place.tp), []).append(rank)
    taken: dict[Group, float] = {}
    for (axis, *_), ranks in meeting.items():
        if len(ranks) < 2:
            continue
        if axis == "dp":
            taken[tuple(ranks)] = min(sheets[rank].wait_dp for rank in ranks)
        else:
            idle = _idle(layout, sheets, ranks)
            taken[tuple(ranks)] = max(0.0, min(sheets[rank].wait_pp - idle[rank] for rank in ranks))
    return taken


def endpoints(late: Mapping[Group, float], nodes: Sequence[str]) -> dict[str, float]:
    """Return how late each node's connection makes its groups, and no other ones; by id.

    late: of each group. nodes: each rank's. A node that is in the same groups as another one, or in all of them, cannot
    be told from others and is left out.
    """
    members = {group: {nodes[rank] for rank in group} for group in late}
    own = {
        id: frozenset(group for group, ids in members.items() if id in ids and len(ids) > 1)
        for id in dict.fromkeys(nodes)
    }
    alike = Counter(own.values())
    judged = {}
    for id, groups in own.items():
        others = [late[group] for group in late if group not in groups and len(members[group]) > 1]
        if groups and others and alike[groups] == 1:
            least, most = (pick(late[group] for group in groups) - max(0.0, *others) for pick in (min, max))
            judged[id] = min(most, LOPSIDED * least) if least > 0 else least
    return judged


def _span(layout: Layout, sheets: Sequence[StepSheet], faster: Mapping[int, float]) -> float:
    """Return the seconds of a step's passes: of the slowest column, since all meet when they are made."""
    columns: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(len(sheets)):
        place = place_of(rank, layout)
        columns.setdefault((place.dp, place.cp, place.tp), []).append(rank)
    spans = []
    for ranks in columns.values():
        costs = [_cost(sheets[rank], faster.get(rank, 1.0)) for rank in ranks]
        works, left = _played(layout, costs, sheets, ranks)
        # What is not laid out is as long as the slowest rank's passes.
        spans.append(max(own[-1].end for own in works) + left * max(cost.whole for cost in costs))
    return max(spans)


def _idle(layout: Layout, sheets: Sequence[StepSheet], ranks: Sequence[int]) -> dict[int, float]:
    """Return the seconds that each rank of a pipeline would wait until its last pass if transfers took no time."""
    costs = [_cost(sheets[rank]) for rank in ranks]
    works, left = _played(layout, costs, sheets, ranks)
    longest = max(cost.whole for cost in costs)
    return {
        rank: own[-1].end - sum(one.end - one.start for one in own) + left * (longest - cost.whole)
        for rank, own, cost in zip(ranks, works, costs, strict=True)
    }


def _cost(sheet: StepSheet, faster: float = 1.0) -> StageCost:
    """Return what a rank's passes of one micro-batch take, `faster` times as fast."""
    each = sheet.rounds * faster
    weight = (sheet.weights or sheet.backward / 2) / each
    return StageCost(
        forward=sheet.forward / each, input=(sheet.backward + sheet.weights) / each - weight, weight=weight
    )


def _played(
    layout: Layout, costs: Sequence[StageCost], sheets: Sequence[StepSheet], ranks: Sequence[int]
) -> tuple[Sequence[Sequence[ScheduledAction]], int]:
    """Return what the ranks of a pipeline compute when, in its first turns, and how many more passes each makes."""
    rounds = max(1, *(round(sheets[rank].rounds / layout.virtual) for rank in ranks))
    laid = min(rounds, TURNS * layout.pp)
    works = play(layout, laid, [costs[rank_of_stage(layout, stage)] for stage in range(layout.stages)])
    return works, (rounds - laid) * layout.virtual
