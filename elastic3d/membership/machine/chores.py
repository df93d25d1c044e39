"""What a leader does when nothing presses: count losses, keep flapping machines out, clear away what is done with."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.leader_state import Lead
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Flap, Quarantine

OLD = 600.0
"""Seconds a tomb stands at least: whoever was stopped for longer finds itself in no generation."""

SOME = 40
"""Keys of a kind that one transaction clears; etcd takes 128 operations."""


def chore(view: View, roll: Roster, policy: Policy, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    """Return one write of housekeeping, None if there is nothing to do."""
    if view.garbage:
        return sweep(view, next(iter(view.garbage)))
    return _count_flap(view, roll, policy, lead) or _clear(view, roll, lead, alarm)


def sweep(view: View, key: str) -> acts.Sweep:
    """Return the removal of a key that is garbage, once: what it did not remove is not what it was."""
    return acts.Sweep(key=key, revision=view.garbage.pop(key), token=view.token)


def _count_flap(view: View, roll: Roster, policy: Policy, lead: Lead) -> acts.Fenced | None:
    while lead.losses and policy.flaps:
        loss = lead.losses[0]
        flap = roll.flaps.get(loss.place)
        if flap is None or flap.id != loss.id:
            more = Flap(id=loss.id, count=(flap.count if flap else 0) + 1)
            return acts.PutFlap(place=loss.place, flap=more, seconds=policy.flap_memory, token=view.token)
        if flap.count >= policy.flaps and loss.place not in roll.quarantines:
            reason = f"lost {flap.count} times within {policy.flap_memory:g} s"
            kept = Quarantine(seconds=policy.kept_out(flap.count), reason=reason, by=view.me.node.name)
            return acts.PutQuarantine(place=loss.place, quarantine=kept, token=view.token)
        lead.losses.pop(0)
    return None


def _clear(view: View, roll: Roster, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    tombs: list[str] = []
    for id, at in view.tombs_at.items():
        # In the order in which they were heard of: those that follow are younger.
        if len(tombs) == SOME or not alarm.due(at + OLD):
            break
        if id not in roll.members and (view.world is None or id not in view.world.nodes):
            tombs.append(id)
    doubts = [id for id, doubt in view.doubts.items() if id in view.tombs or not _doubted(roll, id, doubt.by)]
    drains = [name for name in roll.drains if _over(view, roll, lead, name, alarm)]
    if not (tombs or doubts or drains):
        return None
    return acts.Clear(tombs=tuple(tombs), doubts=tuple(doubts[:SOME]), drains=tuple(drains[:SOME]), token=view.token)


def _doubted(roll: Roster, id: str, by: str) -> bool:
    """Return whether the doubt's author and the member still do not hear each other."""
    author, accused = roll.reports.get(by), roll.reports.get(id)
    return author is not None and (id in author.silent or (accused is not None and by in accused.silent))


def _over(view: View, roll: Roster, lead: Lead, name: str, alarm: Alarm) -> bool:
    """Return whether an operator's drain is done, or nobody came to whom it applied while it lasted."""
    drain, since = roll.drains[name]
    if drain.incarnation:
        return f"{name}@{drain.incarnation}" in view.tombs or alarm.due(since + drain.seconds + OLD)
    if roll.named(name) or (view.world is not None and view.world.names.get(name) in roll.missing):
        return False
    return name in lead.drained or alarm.due(since + drain.seconds)
