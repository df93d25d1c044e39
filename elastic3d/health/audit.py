"""Which steps are audited, and who replays whose micro-batch: pure functions of the step and of the layout.

An audit is a round of micro-batches more than a step needs, in which the ranks of each dp column run a micro-batch of
another column, marked as one that does not count: its gradients are digested and dropped, as those of the fillers are
that a step has anyway where dp does not divide its micro-batches. The same micro-batch over the same weights has to
give the same bits, so that a difference says that one of the two columns computed wrongly.

All ranks, and their loaders ahead of them, know which steps are audited without a word: the step is drawn by the run's
seed, and so are the shift between a column and the one it audits and the round whose micro-batches are replayed. Over
time every column audits every other. A shift between columns of different nodes is preferred, since a node that
computes wrongly may do so on all its devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.data.permutation import key
from elastic3d.planner import place_of
from elastic3d.planner.schedules import problem
from elastic3d.values import Layout

PASSED_OVER = 1000
"""Micro-batch j is replayed under the number M * PASSED_OVER + j: no number below it is one that counts or fills."""

MOST_EXTRA = 64
"""Most extra rounds that are looked for; a schedule that allows none of them is never audited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """How a run is audited under one layout. every: one step in so many, 0 for never. extra: rounds of an audited step.

    why: what keeps it from being audited, "" if it is. shifts: between a column and the one it audits, to draw from.
    """

    every: int
    extra: int
    shifts: tuple[int, ...]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The audit of one step. Column i replays, in each extra round, a micro-batch of column (i + shift) % dp."""

    step: int
    shift: int
    rounds: tuple[int, ...]
    """For each extra round, the round of the step whose micro-batches are replayed."""

    def replays(self, column: int, dp: int, micro_batches: int) -> list[int]:
        """Return the micro-batch that a column replays in each extra round.

        In a round that not all columns have a micro-batch of their own in, the audited column's of round 0 is taken.
        """
        audited = (column + self.shift) % dp
        numbers = [round_ * dp + audited for round_ in self.rounds]
        return [number if number < micro_batches else audited for number in numbers]


def plan(layout: Layout, *, budget: float, blocks: int, counts: Sequence[int], nodes: Sequence[int]) -> AuditPlan:
    """Return how often a run can be audited at a cost of `budget`, a share of its computing (0.01 for 1 %).

    counts: every number of micro-batches that a step may have. nodes: for each rank, a number that tells its node.
    """
    if not budget:
        return AuditPlan(every=0, extra=0, shifts=(), why="audits are off")
    if layout.dp == 1:
        return AuditPlan(every=0, extra=0, shifts=(), why="dp=1: no other rank computes what a rank computes")
    extra = extra_rounds(layout, blocks=blocks, counts=counts)
    if extra is None:
        return AuditPlan(every=0, extra=0, shifts=(), why=f"the schedule of {layout} takes no rounds beyond its own")
    rounds = min(-(-count // layout.dp) for count in counts)
    every = max(1, math.ceil(extra / (budget * rounds) - 1e-9))
    return AuditPlan(every=every, extra=extra, shifts=shifts(layout, nodes))


def extra_rounds(layout: Layout, *, blocks: int, counts: Sequence[int]) -> int | None:
    """Return the fewest rounds, at least 1, that every step may have beyond its own; None if there is no such number.

    Interleaved schedules take rounds in turns of equal size: 4 and 5 may not do where 4 and 6 do.
    """
    for extra in range(1, MOST_EXTRA + 1):
        grown = [(-(-count // layout.dp) + extra) * layout.dp for count in counts]
        if not any(problem(layout, blocks=blocks, micro_batches=count) for count in grown):
            return extra
    return None


def shifts(layout: Layout, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the shifts that bring most ranks together with one of another node; all from 1 to dp - 1 if none does."""
    assert len(nodes) == layout.world
    columns: list[list[int]] = [[] for _ in range(layout.dp)]
    for rank in range(layout.world):
        columns[place_of(rank, layout).dp].append(nodes[rank])
    apart = {
        shift: sum(
            here != there
            for column in range(layout.dp)
            for here, there in zip(columns[column], columns[(column + shift) % layout.dp], strict=True)
        )
        for shift in range(1, layout.dp)
    }
    best = max(apart.values())
    return tuple(shift for shift, count in apart.items() if count == best)


def audit_at(plan: AuditPlan, step: int, *, seed: int, dp: int, micro_batches: int) -> Audit | None:
    """Return the audit of a step, None if it has none.

    Exactly one of each `every` steps in a row is audited, at a place drawn anew for each run of them: nothing that
    repeats with the steps can hide, and no bad luck lets a device go unseen for long.
    """
    if not plan.every:
        return None
    window, place = divmod(step, plan.every)
    if int(key("audit", seed, window)) % plan.every != place:
        return None
    rounds = -(-micro_batches // dp)
    drawn = [int(key("audited round", seed, step, number)) % rounds for number in range(plan.extra)]
    shift = plan.shifts[int(key("audit shift", seed, step)) % len(plan.shifts)]
    return Audit(step=step, shift=shift, rounds=tuple(drawn))
