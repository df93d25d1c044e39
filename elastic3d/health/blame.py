"""What a slow node costs: a step as its ranks made it, played again without the slowness. Pure.

The planner's timeline says when each pass of a pipeline would run if every rank took what its sheet says; with one
node's times divided by how slow it is, the difference is what it costs. Waits take no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def _span(layout: Layout, sheets: Sequence[StepSheet], faster: Mapping[int, float]) -> float:
    """Return the seconds of a step's passes: of the slowest column, since all meet when they are made."""
    columns: dict[tuple[int, int], dict[int, StageCost]] = {}
    rounds: dict[tuple[int, int], int] = {}
    for rank, sheet in enumerate(sheets):
        place: RankPlace = place_of(rank, layout)
        each = sheet.rounds * faster.get(rank, 1.0)
        weight = (sheet.weights or sheet.backward / 2) / each
        cost = StageCost(
            forward=sheet.forward / each, input=(sheet.backward + sheet.weights) / each - weight, weight=weight
        )
        column = place.dp, place.tp
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
