"""Planned changes: newcomers come in, nodes that were told to leave go, machines in quarantine are set aside.

The next generation is prepared beside the running one; when all are prepared, the running trainers leave at a step
boundary, and it is sealed. A drain's deadline cuts the waiting short (`drains`). If no generation is legal without the
nodes that must leave, nothing is prepared: everybody is asked to leave at a boundary, so that the snapshots are held
when the draining nodes go, and the others wait for a node with which to go on from memory.
"""

from __future__ import annotations

from dataclasses import replace

from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership.machine import drains, forming
from elastic3d.membership.machine.balance import gave_up, outdated, sealed_for
from elastic3d.membership.machine.damping import affordable, spent
from elastic3d.membership.machine.flaps import condemned
from elastic3d.membership.machine.generation_index import index_of
from elastic3d.membership.machine.roster import DepartureOrder
from elastic3d.membership.machine.situation import Situation
from elastic3d.values import Cause, Generation

RETRY = 5.0
"""Seconds before a membership whose preparation failed is proposed again."""

PATIENCE = 10
"""However many more nodes come, none waits longer than this many times `Policy.gather`."""


def planned(situation: Situation) -> acts.Fenced | None:
    """Return the next write towards a better membership, None while there is none or it is not due yet."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    if view.coming is not None:
        return _drive(situation)
    current = view.generation
    assert current is not None
    going = drains.leaving(view, roster)
    # A node that lost its lease is not known to be dead: a plan without it would seal it out before its grace is over.
    if roster.missing:
        return None
    # Where an active node cannot reach another one there are no steps, and no boundary to leave at.
    if any(view.active(id) for id in roster.apart):
        return None
    if leader_state.considered != roster.version:
        leader_state.waiting = alarm.now if leader_state.waiting is None else leader_state.waiting
        hurried = drains.hurried(going, alarm)
        gathered = alarm.due(min(roster.changed_at + policy.gather, leader_state.waiting + PATIENCE * policy.gather))
        if not hurried and not (gathered and alarm.due(leader_state.not_before)):
            return None
        aside = [id for id in roster.unfit if view.active(id)]
        if not aside and not affordable(situation):
            return None
        formed = _better(situation, aside, going)
        if formed is not None:
            leader_state.waiting = None
            if not policy.beside:
                return forming.seal(view, formed)
            leader_state.proposed = alarm.now
            return forming.propose(view, formed)
        leader_state.considered, leader_state.waiting = roster.version, None
    # While somebody stays, a node may come that makes it legal; if everybody goes there is nothing to wait for, except
    # for a node that takes over from a single one.
    at_once = policy.beside and drains.everybody(roster) and not drains.may_be_followed(view, going)
    if going and (drains.hurried(going, alarm) or at_once):
        return _ask_all(situation, going)
    return None


def _better(
    situation: Situation,
    aside: list[str],
    going: dict[str, DepartureOrder],
) -> Generation | None:
    """Return the generation to change to; None if none is better, or none is legal."""
    view, roster, policy, leader_state = situation.view, situation.roster, situation.policy, situation.leader_state
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    there = forming.crowd(situation, set(), condemned(situation))
    if not policy.allowed(len(there.candidates)):
        return None
    try:
        formed = forming.form(situation, there)
    except LayoutError:
        return None
    after = index_of(formed).node_ranks
    if after.keys() == index.node_ranks.keys() or (not aside and len(after) <= len(index.node_ranks)):
        return None
    joined = [id for id in index_of(formed).ids if id not in index.node_ranks]
    if going:
        cause, names, why = Cause.DRAIN, list(going), "; ".join(dict.fromkeys(one.reason for one in going.values()))
    elif aside:
        cause, names = Cause.QUARANTINE, aside
        places = dict.fromkeys(roster.members[id].node.place for id in aside)
        why = "; ".join(dict.fromkeys(roster.quarantines[p].reason for p in places if p in roster.quarantines))
    else:
        cause, names, why = Cause.JOIN, joined, ""
    text = ", ".join(sorted(id.partition("@")[0] for id in names[: forming.NAMED]))
    return replace(
        formed,
        attempt=leader_state.next_attempt(),
        cause=cause,
        detail=f"{text}: {why}" if why else text,
        tried_at=current.tried_at,
        spent=spent(situation),
    )


def _ask_all(
    situation: Situation,
    going: dict[str, DepartureOrder],
) -> acts.Fenced | None:
    """Ask everybody to leave at a boundary: none can go on without those that must leave."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    current = view.generation
    assert current is not None
    if not policy.beside:
        # Without elastic3d.run there are no boundaries: they go when their time is over.
        return drains.end(view) if drains.everybody(roster) else None
    text = ", ".join(sorted(id.partition("@")[0] for id in going))
    nobody = replace(
        current,
        number=current.number + 1,
        attempt=leader_state.next_attempt(),
        cause=Cause.DRAIN,
        nodes=(),
        spares=tuple(node for node in current.nodes if node.id not in going),
        detail=f"{text}: no membership is legal without",
    )
    leader_state.proposed = alarm.now
    return forming.propose(view, nobody, switch=True)


def _drive(situation: Situation) -> acts.Fenced | None:
    """Bring a proposal to its seal: all prepared, then all left, then sealed; withdraw it if that cannot happen."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    current, proposal = view.generation, view.proposal
    assert current is not None
    assert proposal is not None
    formed = proposal.generation
    leader_state.proposed = alarm.now if leader_state.proposed is None else leader_state.proposed
    going = drains.leaving(view, roster)
    all_left = len(roster.reports.who("left", current.key)) == len(current.nodes)
    if not formed.nodes:
        if not going:
            return _withdraw(situation)
        if drains.everybody(roster) and (all_left or drains.flushed(going, alarm)):
            return drains.end(view)
        return None
    coming = index_of(formed).node_ranks
    failed = roster.reports.who("failed", formed.key) or roster.reports.who("error", formed.key)
    unfit = not proposal.switch and any(id in coming for id in roster.unfit)
    if formed.cause in (Cause.DRAIN, Cause.QUARANTINE) and not proposal.switch:
        # The reason for it may have been taken back.
        unfit = unfit or not any(view.active(id) for id in roster.unfit)
    unfit = unfit or (not proposal.switch and outdated(situation, formed))
    if roster.uncertain or failed or unfit or alarm.due(leader_state.proposed + policy.prepare):
        if not unfit:
            gave_up(situation, formed)
        return _withdraw(situation, soon=bool(unfit))
    if not proposal.switch:
        prepared = len(roster.reports.who("prepared", formed.key)) == len(formed.nodes)
        if prepared or drains.hurried({id: one for id, one in going.items() if id not in coming}, alarm):
            return forming.propose(view, formed, switch=True)
        return None
    if not all_left:
        return None
    # No step may have been safe yet when it was proposed.
    reached = max(formed.reached, roster.reports.safe())
    made = replace(
        formed,
        spent=spent(situation),
        reached=reached,
        distrusted=view.distrusted,
        rollbacks=view.rollbacks,
        convicted=current.convicted,
    )
    return sealed_for(situation, forming.seal(view, made))


def _withdraw(situation: Situation, *, soon: bool = False) -> acts.Withdraw:
    view, leader_state, alarm = situation.view, situation.leader_state, situation.alarm
    leader_state.proposed, leader_state.considered = None, -1
    leader_state.not_before = alarm.now + (0.0 if soon else RETRY)
    return acts.Withdraw(token=view.token)
