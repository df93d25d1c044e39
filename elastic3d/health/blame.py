"""What a slow node costs, and whose connection is slow: a step as its ranks made it, played again without. Pure.

The planner's timeline says when each pass of a pipeline would run if every rank took what its sheet says; with one
node's times divided by how slow it is, the difference is what it costs. Waits take no part in it.

How long a transfer takes shows without any clock that ranks share. Of ranks that meet, the last one waits only for the
transfer: it is the least of their waits. Of a pipeline it is what its first rank's passes and waits take beyond the
same passes played without transfers. A connection is slow if its endpoint is common to all slow groups, and no other
group is slow: a network that is slow for everybody, or a busy machine, names nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from elastic3d.health.sheet import StepSheet
from elastic3d.planner.placement import RankPlace, place_of
from elastic3d.planner.schedules import rank_of_stage
from elastic3d.planner.timeline import StageCost, play
from elastic3d.values import Layout

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
            first = sheets[ranks[0]]
            taken[tuple(ranks)] = max(0.0, first.busy + first.wait_pp - _span(layout, sheets, {}, only=ranks))
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
            judged[id] = min(late[group] for group in groups) - max(0.0, *others)
    return judged


def _span(
    layout: Layout, sheets: Sequence[StepSheet], faster: Mapping[int, float], only: Container[int] | None = None
) -> float:
    """Return the seconds of a step's passes: of the slowest column, since all meet when they are made.

    only: one column's ranks, the others are left out.
    """
    columns: dict[tuple[int, int, int], dict[int, StageCost]] = {}
    rounds: dict[tuple[int, int, int], int] = {}
    for rank, sheet in enumerate(sheets):
        if only is not None and rank not in only:
            continue
        place: RankPlace = place_of(rank, layout)
        each = sheet.rounds * faster.get(rank, 1.0)
        weight = (sheet.weights or sheet.backward / 2) / each
        cost = StageCost(
            forward=sheet.forward / each, input=(sheet.backward + sheet.weights) / each - weight, weight=weight
        )
        column = place.dp, place.cp, place.tp
        columns.setdefault(column, {})[place.pp] = cost
        rounds[column] = max(rounds.get(column, 1), round(sheet.rounds / layout.virtual))
    spans = []
    for column, costs in columns.items():
        laid = min(rounds[column], TURNS * layout.pp)
        ranks = play(layout, laid, [costs[rank_of_stage(layout, stage)] for stage in range(layout.stages)])
        # What is not laid out is as long as the slowest rank's passes.
        rest = (rounds[column] - laid) * layout.virtual * max(cost.whole for cost in costs.values())
        spans.append(max(works[-1].end for works in ranks) + rest)
    return max(spans)
