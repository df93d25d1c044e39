"""A run goes back: which states no generation may go on from is put into the record, before anything else.

It does because a device was convicted, or because the loss jumped up, which also leaves samples out from then on. The
rule does not wait for the next generation: if too few nodes are left to form one, the job ends, and the one that is
started after it has to know. Every node whose trainers ended for it says how far back, so that the rule does not depend
on the word of a node that was convicted, which may be gone by then, nor on that of any other. They name that node, too,
for the same reason: all ranks hear the same of a hearing, and two nodes are believed against a third, never one alone.

A death in the same second may have the next generation sealed before anybody spoke, and more deaths several more. What
is said of an earlier generation therefore counts until the record has it, however many were sealed meanwhile: the rule
then refuses what all of these made as well, since their trainers may have gone on from such a state, and the present
one ends. A jump of the loss need not be heard late: the same step has it again.

Words outlive what they led to, and must not lead to it twice: a machine that an operator has admitted again is not kept
out for what is over, whoever leads by then. So the record also says which convictions it knows of (`convicted`: the
newest generation in which a node was convicted, by id). It says so only once the machine is kept out, with the
generation that is formed without it, or at once where it trains no more; and a member drops its words when the record
of a later generation has all that they say. Until then it keeps those of several generations, none in place of another,
and a node that is put out before it could tell them says them when it comes back, under another id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastic3d.distrust import Distrust, with_rule
from elastic3d.membership import actions as acts
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import ReasonToGoBack, Report
from elastic3d.rollback import Rollback
from elastic3d.values import Generation

WITNESSES = 2
"""Nodes that have to name another one before it is taken for convicted without its own word, each of which counts once,
however many of its incarnations say so."""


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
    said = (*_now(situation), *(one for one in _late(situation) if not _refused(current, one[1])))
    return min((word.clean for _, word in said if word.clean >= 0), default=None)


def spike(situation: Situation) -> ReasonToGoBack | None:
    """Return what is said if the sealed generation goes back because its loss jumped up, None if it does not."""
    current = situation.view.generation
    assert current is not None
    said = (word for _, word in _now(situation) if word.rollback is not None)
    return next((word for word in said if _goal(word).before == current.number + 1), None)


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
    for id, one in _named(_late(situation)).items():
        if not _known(current, id, one.key):
            known.setdefault(id, one)
    return known


def training(situation: Situation) -> dict[str, Conviction]:
    """Return the nodes that train on convicted machines, by id: that which was convicted, or one that came after it."""
    current = situation.view.generation
    places = {one.place: one for one in liars(situation).values()}
    if not places or current is None:
        return {}
    return {node.id: places[node.place] for node in current.nodes if node.place in places}


def convicted(situation: Situation) -> dict[str, int]:
    """Return which convictions the record knows of, with those that are acted upon now: all, once a machine is kept out
    for each.
    """
    current = situation.view.generation
    known = dict(current.convicted) if current is not None else {}
    for id, one in liars(situation).items():
        known[id] = max(known.get(id, 0), number_of(one.key))
    return known


def note(situation: Situation) -> acts.Fenced | None:
    """Return the write by which the record knows of convictions of machines that do not train; None if it does.

    Nothing has to end for them. To be decided once their machines are kept out, and one that is to train next has to
    wait.
    """
    view, current = situation.view, situation.view.generation
    assert current is not None
    taking_part = {one.place for one in training(situation).values()}
    gone = {id: number_of(one.key) for id, one in liars(situation).items() if one.place not in taking_part}
    if not gone:
        return None
    if view.proposal is not None:
        # One of these machines may be part of it.
        return acts.Withdraw(token=view.token)
    noted = replace(current, convicted={**current.convicted, **gone})
    return acts.Mend(generation=noted, token=view.token, previous=view.generation_revision, base=view.standing)


def number_of(key: str) -> int:
    """Return the number of the generation with this key."""
    return int(key.partition(".")[0])


def _said(situation: Situation) -> Iterator[tuple[str, ReasonToGoBack]]:
    reports = situation.roster.reports
    for id in reports.returning:
        for word in reports[id].goes_back:
            yield id, word


def _now(situation: Situation) -> list[tuple[str, ReasonToGoBack]]:
    """Return what is said of the sealed generation, and by whom, of those who are in it."""
    current, index = situation.view.generation, situation.view.index
    assert current is not None
    assert index is not None
    return [(id, word) for id, word in _said(situation) if word.key == current.key and id in index.node_ranks]


def _late(situation: Situation) -> list[tuple[str, ReasonToGoBack]]:
    """Return what is said of the generations before: by those who were in them, since no others' trainers ended."""
    current = situation.view.generation
    assert current is not None
    return [
        (id, word)
        for id, word in _said(situation)
        if word.key != current.key and word.number <= current.number and word.rollback is None
    ]


def _named(said: Iterable[tuple[str, ReasonToGoBack]]) -> dict[str, Conviction]:
    """Return the nodes that these words convict, by id, each for the newest generation in which it was."""
    by: dict[tuple[int, str, str], dict[str, ReasonToGoBack]] = defaultdict(dict)
    for id, word in said:
        for accused in word.accused:
            by[word.number, word.key, accused][_node(id)] = word
    convicted: dict[str, Conviction] = {}
    for (_, key, accused), witnesses in sorted(by.items(), key=lambda one: one[0]):
        if _node(accused) in witnesses or len(witnesses) >= WITNESSES:
            word = witnesses.get(_node(accused)) or next(iter(witnesses.values()))
            convicted[accused] = Conviction(place=word.accused[accused], key=key, detail=word.detail)
    return convicted


def _node(id: str) -> str:
    """Return the node of which this is an incarnation."""
    return id.partition("@")[0]


def _known(generation: Generation, id: str, key: str) -> bool:
    """Return whether the record knows that a node was convicted in the generation `key`, or in a later one."""
    return generation.convicted.get(id, -1) >= number_of(key)


def _refused(generation: Generation, word: ReasonToGoBack) -> bool:
    """Return whether a rule of the record refuses all that is said not to count."""
    return any(rule.before > word.number and rule.step <= word.clean for rule in generation.distrusted)


def _has(generation: Generation, word: ReasonToGoBack) -> bool:
    """Return whether the record of a later generation has all that is said of an earlier one."""
    if word.rollback is not None:
        return True
    refused = word.clean < 0 or _refused(generation, word)
    return refused and all(_known(generation, id, word.key) for id in word.accused)


def _goal(word: ReasonToGoBack) -> Rollback:
    assert word.rollback is not None
    return word.rollback


def distrust(situation: Situation) -> acts.Fenced | None:
    """Return the write that puts such a rule into the sealed generation's record; None if it is there.

    Steps beyond it are made again: none of them was reached, and trying them again is progress.
    """
    view, clean, spiked = situation.view, vouched(situation), spike(situation)
    current = view.generation
    assert current is not None
    if clean is None:
        return None
    rules = with_rule(current.distrusted, Distrust(before=current.number + 1, step=clean))
    back = spiked.rollback if spiked is not None else None
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


def with_reason(report: Report, word: ReasonToGoBack) -> Report:
    """Return a member's report with one more reason why the run goes back, in place of what it said of the same
    generation.
    """
    others = tuple(one for one in report.goes_back if one.key != word.key)
    return replace(report, goes_back=(*others, word))


def unheard(report: Report, generation: Generation | None) -> Report:
    """Return a member's report without what the record of a later generation has."""
    if generation is None or not report.goes_back:
        return report
    left = tuple(
        word
        for word in report.goes_back
        if word.key == generation.key or word.number > generation.number or not _has(generation, word)
    )
    return report if len(left) == len(report.goes_back) else replace(report, goes_back=left)
