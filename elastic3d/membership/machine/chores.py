"""A leader's work when nothing is urgent: write down losses (`flaps`), clear away what is no longer needed."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.flaps import write_flap
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.view import View

OLD = 600.0
"""Seconds a tomb stands at least: a node that was stopped for longer finds itself in no generation."""

SOME = 40
"""Most keys of a kind that one transaction clears; etcd takes 128 operations."""


def chore(situation: Situation) -> acts.Fenced | None:
    """Return one write of housekeeping, None if there is nothing to do."""
    view = situation.view
    if view.garbage:
        return sweep(view, next(iter(view.garbage)))
    return write_flap(situation) or _clear(situation)


def sweep(view: View, key: str) -> acts.Sweep:
    """Return the removal of a key that holds garbage, once: where it fails the key has changed."""
    return acts.Sweep(key=key, revision=view.garbage.pop(key), token=view.token)


def _clear(situation: Situation) -> acts.Fenced | None:
    view, roster, alarm = situation.view, situation.roster, situation.alarm
    tombs: list[str] = []
    for id, at in view.tombs_at.items():
        # In the order in which they became known: those that follow are younger.
        if len(tombs) == SOME or not alarm.due(at + OLD):
            break
        if id not in roster.members and (view.index is None or id not in view.index.nodes):
            tombs.append(id)
    doubts = [id for id, doubt in view.doubts.items() if id in view.tombs or not _doubted(roster, id, doubt.by)]
    drains = [name for name in roster.drains if _over(situation, name)]
    if not (tombs or doubts or drains):
        return None
    return acts.Clear(tombs=tuple(tombs), doubts=tuple(doubts[:SOME]), drains=tuple(drains[:SOME]), token=view.token)


def _doubted(roster: Roster, id: str, by: str) -> bool:
    """Return whether the doubt's author and the member still do not hear each other."""
    author, accused = roster.reports.get(by), roster.reports.get(id)
    return author is not None and (id in author.silent or (accused is not None and by in accused.silent))


def _over(situation: Situation, name: str) -> bool:
    """Return whether an operator's drain is done, or lasted its time without a node to which it applies."""
    view, roster, leader_state, alarm = situation.view, situation.roster, situation.leader_state, situation.alarm
    drain, since = roster.drains[name]
    if drain.incarnation:
        return f"{name}@{drain.incarnation}" in view.tombs or alarm.due(since + drain.seconds + OLD)
    if roster.named(name) or (view.index is not None and view.index.names.get(name) in roster.missing):
        return False
    return name in leader_state.drained or alarm.due(since + drain.seconds)
