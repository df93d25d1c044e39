"""The members that the leader buries: strangers, the older of two under one name, the dead, those that left as told,
and those whose code fails.
"""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine import drains
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.view import View
from elastic3d.membership.records import Out, Tomb

TOGETHER = 100
"""Most dead without a registration that get tombs; for a whole zone, to be in no generation has to be enough."""


def evict(
    situation: Situation,
    lost: dict[str, str],
    missing: dict[str, str],
    raising: dict[str, str],
) -> list[acts.Write]:
    """Return the tombs to put up now, each once, the leader's own last.

    lost: the dead; missing: those held to be dead because they are not registered; raising: those whose code raises
    where no other's does; each with the evidence.
    """
    view, roster, leader_state, alarm = situation.view, situation.roster, situation.leader_state, situation.alarm
    me = view.me.node
    wanted: list[tuple[str, Tomb]] = []
    for id, detail in roster.refused.items():
        wanted.append((id, _tomb(id, Out.REFUSED, detail, me.name)))
    for id, by in roster.replaced.items():
        if by not in roster.members:
            continue
        name = id.partition("@")[0]
        detail = f"another process registered as node {name}; if both live, give every node a name of its own"
        wanted.append((id, _tomb(id, Out.REPLACED, detail, me.name)))
    few = len({**lost, **missing}) <= TOGETHER
    for id, detail in {**missing, **lost}.items():
        if few or id in roster.members:
            wanted.append((id, _tomb(id, Out.DEAD, detail, me.name)))
    for id, detail in raising.items():
        wanted.append((id, _tomb(id, Out.FAILED, detail, me.name)))
    for id, one in roster.draining.items():
        if not view.active(id) or _has_left(view, roster, id):
            wanted.append((id, drains.gone(view, id, one)))
        elif one.deadline is not None and alarm.due(one.deadline) and not drains.everybody(roster):
            wanted.append((id, drains.gone(view, id, one, late=True)))
    wanted.sort(key=lambda one: one[0] == me.id)
    writes: list[acts.Write] = []
    for id, tomb in wanted:
        if id not in view.tombs and id not in leader_state.buried:
            leader_state.buried[id] = None
            if tomb.how is Out.LEFT:
                leader_state.drained[id.partition("@")[0]] = None
            writes.append(acts.Bury(id=id, tomb=tomb, missing=id in missing and id not in lost))
    return writes


def _has_left(view: View, roster: Roster, id: str) -> bool:
    """Return whether the node left at the boundary at which everybody was asked to leave, for want of a successor."""
    current, coming = view.generation, view.coming
    if current is None or coming is None or coming.nodes or drains.everybody(roster):
        return False
    return len(roster.reports.who("left", current.key)) == len(current.nodes)


def _tomb(id: str, how: Out, detail: str, by: str) -> Tomb:
    return Tomb(incarnation=id.partition("@")[2], how=how, detail=detail, by=by)
