"""Memory ran out: the next generation is formed to need less, where a layout is left that does.

What was missing is in the reports of the nodes on which it happened, so that a leader that comes between the shortfall
and the next generation decides the same; what was learned is in the record of every generation from then on. A
generation that is formed to need less is something new: it counts as no try of what failed before. The ladder ends by
itself, since each rung needs a share less than the one before; where none is left, tries count as ever.

A bound is never loosened while the job's record lasts. That a shortage is over, or that a machine with more memory has
taken a place, shows only by trying, and each try that fails costs a re-forming and the steps since the last snapshot,
for ever again; what may be gained is the time of some recomputation. Nor does a larger device help where the others
stayed as they were: the fullest rank may be on any of them. A job that is started anew without that record plans
without bounds, with the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from elastic3d.errors import LayoutError
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.stalls import Verdict
from elastic3d.shortfall import MemoryBound, Shortfall
from elastic3d.values import Generation


def shortfalls(situation: Situation) -> dict[str, Shortfall]:
    """Return what was missing in the sealed generation, by id of its active nodes in rank order."""
    view, roster = situation.view, situation.roster
    current, index = view.generation, view.index
    if current is None or index is None:
        return {}
    said = [id for id in roster.reports.who("error", current.key) if id in index.node_ranks and id in roster.members]
    reports = {id: roster.reports[id] for id in sorted(said, key=lambda id: index.node_ranks[id])}
    return {id: report.short for id, report in reports.items() if report.out_of_memory and report.short is not None}


def lower(situation: Situation) -> MemoryBound | None:
    """Return below which bound the next generation is formed because memory ran out in this one.

    None where that is not why it ends, nothing is to be done about it, or no layout of as many nodes stays below one.
    Planned once for the same shortfalls.
    """
    view, ladder, state = situation.view, situation.ladder, situation.leader_state
    current, profile = view.generation, view.me.profile
    if ladder is None or current is None or current.layout is None or profile is None or not situation.policy.beside:
        return None
    short = shortfalls(situation)
    asked = (current.key, tuple(short.items()))
    if state.bounded is None or state.bounded[0] != asked:
        state.bounded = (asked, _below(situation, current, short) if short else None)
    return state.bounded[1]


def _below(situation: Situation, current: Generation, short: dict[str, Shortfall]) -> MemoryBound | None:
    me, ladder = situation.view.me, situation.ladder
    assert ladder is not None
    assert me.profile is not None
    nodes = len(current.nodes)
    for bound in ladder.bounds(current, me.profile, short):
        try:
            plan = situation.planner(nodes, me, current.layout, (), bound, situation.policy.numbers(nodes))
        except LayoutError:
            continue
        if plan.fits:
            return replace(bound, recompute=plan.recompute)
    return None


def acted(situation: Situation) -> MemoryBound | None:
    """Return the bound that is acted upon, None for none."""
    return lower(situation) if situation.ladder is not None and situation.ladder.acts else None


def reported(situation: Situation, climbed: Generation | None) -> Verdict | None:
    """Return what is reported about memory that ran out in the sealed generation, None if it did not.

    climbed: the generation that is formed to need less, or would be; None where there is none.
    """
    current, profile, ladder = situation.view.generation, situation.view.me.profile, situation.ladder
    short = shortfalls(situation)
    if ladder is None or current is None or profile is None or not short:
        return None
    return ladder.verdict(current, profile, short, climbed, situation.roster.reports.step())
