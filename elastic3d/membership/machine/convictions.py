"""A run goes back: which states no generation may go on from is put into the record, before anything else.

It does because a device was convicted, or because the loss jumped up, which also leaves samples out from then on. The
rule does not wait for the next generation: if too few nodes are left to form one, the job ends, and the one that is
started after it has to know. Every node whose trainers ended for it says how far back, so that the rule does not depend
on the word of a node that was convicted, which may be gone by then, nor on that of any other. They name that node, too,
for the same reason: all ranks hear the same of a hearing, and two nodes are believed against a third, never one alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from elastic3d.distrust import Distrust, with_rule
from elastic3d.membership import actions as acts
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import Report
from elastic3d.rollback import Rollback
from elastic3d.values import Generation

WITNESSES = 2
"""Nodes that have to name another one before it is taken for convicted without its own word."""


def vouched(situation: Situation) -> int | None:
    """Return the newest step to go on from, if the sealed generation ended in order to go back; None if it did not."""
    view, reports = situation.view, situation.roster.reports
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    said = {**reports.who("failed", current.key), **reports.who("peer_lost", current.key)}
    return min((reports[id].clean for id in said if id in index.node_ranks and reports[id].clean >= 0), default=None)


def rollback(situation: Situation) -> Rollback | None:
    """Return for what the sealed generation goes back because its loss jumped up, None if it does not."""
    view, reports = situation.view, situation.roster.reports
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    said = (reports[id].rollback for id in reports.who("peer_lost", current.key) if id in index.node_ranks)
    return next((one for one in said if one is not None and one.before == current.number + 1), None)


def liars(situation: Situation) -> dict[str, str]:
    """Return the nodes of the sealed generation of which a device computes wrongly, with what is said of them.

    They say so of themselves, or, where one is gone before it could, `WITNESSES` others of the generation do.
    """
    current, index, reports = situation.view.generation, situation.view.index, situation.roster.reports
    if current is None or index is None:
        return {}
    failed, lost = reports.who("failed", current.key), reports.who("peer_lost", current.key)
    wrong = {id: reports[id].detail for id in failed if reports[id].lying == current.key and id in index.node_ranks}
    witnesses: dict[str, list[str]] = defaultdict(list)
    for id in lost:
        for accused in dict.fromkeys(reports[id].accused if id in index.node_ranks else ()):
            if accused != id and accused in index.node_ranks:
                witnesses[accused].append(id)
    named = {id: reports[by[0]].detail for id, by in sorted(witnesses.items()) if len(by) >= WITNESSES}
    return named | wrong


def distrust(situation: Situation) -> acts.Fenced | None:
    """Return the write that puts such a rule into the sealed generation's record; None if it is there.

    Steps beyond it are made again: none of them was reached, and trying them again is progress.
    """
    view, clean, back = situation.view, vouched(situation), rollback(situation)
    current = view.generation
    assert current is not None
    if clean is None:
        return None
    rules = with_rule(current.distrusted, Distrust(before=current.number + 1, step=clean))
    left_out = current.rollbacks if back is None or back in current.rollbacks else (*current.rollbacks, back)
    if (rules, left_out) == (current.distrusted, current.rollbacks):
        return None
    if view.proposal is not None:
        # It is written as changes against the record as it stands.
        return acts.Withdraw(token=view.token)
    mended = replace(
        current,
        distrusted=rules,
        rollbacks=left_out,
        reached=min(current.reached, clean),
        tried_at=min(current.tried_at, clean),
    )
    return acts.Mend(generation=mended, token=view.token, previous=view.generation_revision, base=view.standing)


def goes_back(formed: Generation, clean: int | None) -> Generation:
    """Return the generation that follows, which says how far it goes back; the same one with None."""
    if clean is None:
        return formed
    back = f"; the run goes on from the state of step {clean} or one before"
    return replace(formed, reached=min(formed.reached, clean), detail=formed.detail + back)


def made_again(report: Report, before: tuple[Distrust, ...], now: tuple[Distrust, ...]) -> Report:
    """Return a member's report without the steps that rules which are new refuse."""
    newest = min((rule.step for rule in now if rule not in before), default=None)
    if newest is None:
        return report
    return replace(report, step=min(report.step, newest), safe=min(report.safe, newest))
