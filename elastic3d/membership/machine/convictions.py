"""A device was convicted: which states no generation may go on from is put into the record, before anything else.

The rule does not wait for the next generation: if too few nodes are left to form one, the job ends, and the one that is
started after it has to know. Every node whose trainers ended for the conviction says how far the audits vouch, so that
the rule does not depend on the word of the node that was convicted, which may be gone by then.
"""

from __future__ import annotations

from dataclasses import replace

from elastic3d.distrust import Distrust, with_rule
from elastic3d.membership import actions as acts
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import Report
from elastic3d.values import Generation


def vouched(situation: Situation) -> int | None:
    """Return the newest step vouched for, if a device of the sealed generation was convicted; None if none was."""
    view, reports = situation.view, situation.roster.reports
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    said = {**reports.who("failed", current.key), **reports.who("peer_lost", current.key)}
    return min((reports[id].clean for id in said if id in index.node_ranks and reports[id].clean >= 0), default=None)


def distrust(situation: Situation) -> acts.Fenced | None:
    """Return the write that puts a conviction's rule into the sealed generation's record; None if it is there.

    Steps beyond it are made again: none of them was reached, and trying them again is progress.
    """
    view, clean = situation.view, vouched(situation)
    current = view.generation
    assert current is not None
    if clean is None:
        return None
    rules = with_rule(current.distrusted, Distrust(before=current.number + 1, step=clean))
    if rules == current.distrusted:
        return None
    if view.proposal is not None:
        # It is written as changes against the record as it stands.
        return acts.Withdraw(token=view.token)
    mended = replace(
        current,
        distrusted=rules,
        reached=min(current.reached, clean),
        tried_at=min(current.tried_at, clean),
    )
    return acts.Mend(generation=mended, token=view.token, previous=view.generation_revision, base=view.standing)


def goes_back(formed: Generation, clean: int | None) -> Generation:
    """Return the generation that follows a conviction, None for none: it says how far it goes back."""
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
