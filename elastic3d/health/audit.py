"""Which steps are audited, and who replays whose micro-batch: pure functions of the step and of the layout.

An audit is a round of micro-batches more than a step needs (of whole leaves, where several micro-batches are summed
before they are sent), in which the ranks of each dp column run a micro-batch of
another column, marked as one that does not count: its gradients are digested and dropped, as those of the fillers are
that a step has anyway where dp does not divide its micro-batches. The same micro-batch over the same weights has to
give the same bits, so that a difference says that one of the two columns computed wrongly.

All ranks, and their loaders ahead of them, know which steps are audited without a word: the step is drawn by the run's
seed, and so are the shift between a column and the one it audits and the round whose micro-batches are replayed. Over
time every column audits every other. A shift between columns of different nodes is preferred, since a node that
computes wrongly may do so on all its devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.coverage import AuditCoverage
from elastic3d.data.micro_batches import PASSED_OVER
from elastic3d.data.permutation import key
from elastic3d.owners import Owners
from elastic3d.planner import place_of
from elastic3d.planner.extra_rounds import extra_rounds, fewest, interval
from elastic3d.values import Layout, rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """How a run is audited under one layout. every: one step in so many, 0 for never. extra: rounds of an audited step
    beyond its own, a multiple of `leaf`.

    why: what keeps it from being audited, "" if it is. shifts: between a column and the one it audits, to draw from.
    leaf: how many micro-batches are summed before they are sent, and so replayed together. hearing: the fewest rounds
    in which all columns can run one leaf without a step. since: the step from which on steps are counted; none is
    audited before. share: what an audited step takes longer if all rounds take as long, of a step with the fewest.
    """

    every: int
    extra: int
    shifts: tuple[int, ...]
    why: str = ""
    leaf: int = 1
    hearing: int = 1
    since: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The audit of one step. Column i replays leaves of column (i + shift) % dp; a leaf is mostly one micro-batch."""

    step: int
    shift: int
    turns: tuple[int, ...]
    """For each leaf that is replayed, the turn of the step in which it was computed."""

    def replays(self, column: int, owners: Owners, leaves: int) -> list[int]:
        """Return the leaves that a column replays after its own, of `leaves` that the step has.

        In a turn that the audited column sits out, its last one before it is taken, and in the step's last turn, if it
        has no leaf there, that of turn 0.
        """
        return self.audited((column + self.shift) % owners.dp, owners, leaves)

    def audited(self, column: int, owners: Owners, leaves: int) -> list[int]:
        """Return the leaves of a column that another one replays."""
        numbers = [owners.newest(column, turn) for turn in self.turns]
        return [number if number < leaves else column for number in numbers]


def plan(
    layout: Layout, *, budget: float, blocks: int, counts: Sequence[int], nodes: Sequence[int], leaf: int = 1
) -> AuditPlan:
    """Return how often a run can be audited at a cost of `budget`, a share of its computing (0.01 for 1 %).

    counts: every number of micro-batches that a step may have. nodes: for each rank, a number that tells its node.
    leaf: how many micro-batches are summed before they are sent.
    """
    if not budget:
        return AuditPlan(every=0, extra=0, shifts=(), why="audits are off")
    if layout.dp == 1:
        return AuditPlan(every=0, extra=0, shifts=(), why="dp=1: no other rank computes what a rank computes")
    if min(counts) < leaf * layout.dp:
        few = f"{min(counts)} micro-batches leave some of dp={layout.dp} columns without one of their own"
        return AuditPlan(every=0, extra=0, shifts=(), why=few)
    extra = extra_rounds(layout, blocks=blocks, counts=counts, leaf=leaf)
    hearing = hearing_rounds(layout, blocks=blocks, leaf=leaf)
    if extra is None or hearing is None:
        return AuditPlan(every=0, extra=0, shifts=(), why=f"the schedule of {layout} takes no rounds beyond its own")
    own = min(rounds(count, layout.dp, leaf, layout.shares) for count in counts)
    return AuditPlan(
        every=interval(extra, budget, own),
        extra=extra,
        shifts=shifts(layout, nodes),
        leaf=leaf,
        hearing=hearing,
        share=extra / own,
    )


def hearing_rounds(layout: Layout, *, blocks: int, leaf: int) -> int | None:
    """Return the fewest rounds in which all columns can run one leaf without a step; None if no schedule allows any."""
    return fewest(layout, blocks, [0], leaf)


def coverage(made: AuditPlan, layout: Layout, *, counts: Sequence[int], nodes: Sequence[int]) -> AuditCoverage:
    """Return what audits by this plan see; arguments as for `plan`.

    Of the largest steps, in which the replayed share is the smallest.
    """
    if not made.every:
        return AuditCoverage(off=made.why)
    twice = made.extra * layout.dp / max(counts)
    places: dict[tuple[int, int, int], set[int]] = {}
    for rank in range(layout.world):
        place = place_of(rank, layout)
        places.setdefault((place.pp, place.cp, place.tp), set()).add(nodes[rank])
    return AuditCoverage(every=made.every, pieces=min(1.0, twice), nodes=min(map(len, places.values())))


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


def audit_at(plan: AuditPlan, step: int, *, seed: int, owners: Owners, micro_batches: int) -> Audit | None:
    """Return the audit of a step, None if it has none.

    Exactly one of each `every` steps in a row is audited, at a place drawn anew for each run of them: nothing that
    repeats with the steps can hide, and no bad luck lets a device go unseen for long.
    """
    if not plan.every or step < plan.since:
        return None
    window, place = divmod(step - plan.since, plan.every)
    if int(key("audit", seed, plan.since + window)) % plan.every != place:
        return None
    turns = owners.turns(micro_batches // plan.leaf)
    drawn = [int(key("audited round", seed, step, number)) % turns for number in range(plan.extra // plan.leaf)]
    shift = plan.shifts[int(key("audit shift", seed, step)) % len(plan.shifts)]
    return Audit(step=step, shift=shift, turns=tuple(drawn))


def heard(plan: AuditPlan, step: int, *, seed: int, owners: Owners, micro_batches: int) -> list[int]:
    """Return the micro-batches over which a hearing may be held in a step: those that two columns run; none on most."""
    audit = audit_at(plan, step, seed=seed, owners=owners, micro_batches=micro_batches)
    if audit is None:
        return []
    leaves = {leaf for column in range(owners.dp) for leaf in audit.audited(column, owners, micro_batches // plan.leaf)}
    return [leaf * plan.leaf + number for leaf in sorted(leaves) for number in range(plan.leaf)]


def replayed(plan: AuditPlan, step: int, *, seed: int, owners: Owners, column: int, micro_batches: int) -> list[int]:
    """Return the numbers under which a column runs other columns' micro-batches after its own; none on most steps.

    Micro-batch j of M is replayed under the number M * PASSED_OVER + j.
    """
    audit = audit_at(plan, step, seed=seed, owners=owners, micro_batches=micro_batches)
    if audit is None:
        return []
    leaves = audit.replays(column, owners, micro_batches // plan.leaf)
    numbers = [leaf * plan.leaf + number for leaf in leaves for number in range(plan.leaf)]
    return [micro_batches * PASSED_OVER + number for number in numbers]
