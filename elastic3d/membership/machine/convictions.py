"""A run goes back: which states no generation may go on from is put into the record, before anything else.

It does because a device was convicted, or because the loss jumped up, which also leaves samples out from then on. The
rule does not wait for the next generation: if too few nodes are left to form one, the job ends, and the one that is
started after it has to know. Every node whose trainers ended for it says how far back, so that the rule does not depend
on the word of a node that was convicted, which may be gone by then, nor on that of any other. They name that node, too,
for the same reason: all ranks hear the same of a hearing, and two nodes are believed against a third, never one alone.

A death in the same second may have the next generation sealed before anybody spoke. What is said of the generation
before is therefore heard, too, unless a rule has it: the rule then refuses what the sealed one makes as well, since its
trainers may have gone on from such a state, and it ends. A jump of the loss need not be heard late: the same step has
it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elastic3d.distrust import Distrust, with_rule
from elastic3d.membership import actions as acts
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import Report
from elastic3d.rollback import Rollback
from elastic3d.values import Cause, Generation

WITNESSES = 2
"""Nodes that have to name another one before it is taken for convicted without its own word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """A node of which a device computes wrongly. place: its machine. key: of the generation in which it was convicted.

    detail: in whose words, and what of.
    """

    place: str
    key: str
    detail: str


def vouched(situation: Situation) -> int | None:
    """Return the newest step to go on from, if trainers ended in order to go back; None if none did.

    No state has to be refused for a device that was convicted before any step was made with what it computed.
    """
    current = situation.view.generation
    assert current is not None
    late = {id: said for id, said in _late(situation).items() if not _has(current, said.clean)}
    return min((said.clean for said in (*_now(situation).values(), *late.values()) if said.clean >= 0), default=None)


def rollback(situation: Situation) -> Rollback | None:
    """Return for what the sealed generation goes back because its loss jumped up, None if it does not."""
    current = situation.view.generation
    assert current is not None
    said = (one.rollback for one in _now(situation).values())
    return next((one for one in said if one is not None and one.before == current.number + 1), None)


def refused_itself(generation: Generation) -> bool:
    """Return whether the record refuses what its own generation makes: it has to end."""
    return any(rule.before > generation.number for rule in generation.distrusted)


def liars(situation: Situation) -> dict[str, Conviction]:
    """Return the nodes of which a device computes wrongly, by id.

    They say so of themselves, or, where one is gone before it could, `WITNESSES` others of its generation do.
    """
    current, index = situation.view.generation, situation.view.index
    if current is None or index is None:
        return {}
    known = {id: one for id, one in _named(_now(situation)).items() if id in index.node_ranks}
    heard = current.cause is Cause.LYING or any(rule.before == current.number for rule in current.distrusted)
    for id, one in _named(_late(situation)).items():
        # Whoever was kept out before this one was sealed may have been admitted again since, and is not in it.
        if id in index.node_ranks or not heard:
            known.setdefault(id, one)
    return known


def _now(situation: Situation) -> dict[str, Report]:
    """Return what is said of the sealed generation, by those who are in it."""
    reports, current, index = situation.roster.reports, situation.view.generation, situation.view.index
    assert current is not None
    assert index is not None
    return {id: reports[id] for id in reports.who("goes_back", current.key) if id in index.node_ranks}


def _late(situation: Situation) -> dict[str, Report]:
    """Return what is said of the generation before by those who were in it: nobody else has trainers that ended."""
    reports, current = situation.roster.reports, situation.view.generation
    assert current is not None
    said = {id: reports[id] for id in reports.returning if reports[id].rollback is None}
    return {id: one for id, one in said.items() if int(one.goes_back.partition(".")[0]) == current.number - 1}


def _named(said: Mapping[str, Report]) -> dict[str, Conviction]:
    """Return the nodes that these reports convict, by id."""
    by: dict[str, list[str]] = defaultdict(list)
    for id, report in said.items():
        for accused in report.accused:
            by[accused].append(id)
    convicted: dict[str, Conviction] = {}
    for accused, witnesses in sorted(by.items()):
        if accused in witnesses or len(witnesses) >= WITNESSES:
            report = said[accused if accused in witnesses else witnesses[0]]
            convicted[accused] = Conviction(place=report.accused[accused], key=report.goes_back, detail=report.detail)
    return convicted


def _has(generation: Generation, clean: int) -> bool:
    """Return whether a rule of the record has what is said of the generation before."""
    return any(rule.before >= generation.number and rule.step <= clean for rule in generation.distrusted)


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
