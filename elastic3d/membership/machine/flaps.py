"""Machines that lose their nodes again and again, and are kept out because of it."""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.leader_state import CountedLoss
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.triggers import Interruption
from elastic3d.membership.records import Flap, Quarantine
from elastic3d.values import Cause


def count(situation: Situation, lost: dict[str, str]) -> None:
    """Put new losses of members that take part, or were about to, on the leader's list. `lost`: tombs under way."""
    view, leader_state = situation.view, situation.leader_state
    for id in (*view.fallen, *lost):
        place = view.place(id)
        if place is not None and id not in leader_state.counted:
            leader_state.counted[id] = None
            leader_state.losses.append(CountedLoss(id=id, place=place))


def blame(situation: Situation, why: Interruption) -> None:
    """Put a failure of one node on the list. Where torchrun restarts the workers, it is not known whose it was."""
    view, policy, leader_state = situation.view, situation.policy, situation.leader_state
    current, place = view.generation, view.place(why.culprit)
    if why.cause is Cause.FAILURE and current is not None and place is not None and policy.beside:
        failure = f"{why.culprit}/{current.key}"
        if failure not in leader_state.counted:
            leader_state.counted[failure] = None
            leader_state.losses.append(CountedLoss(id=failure, place=place))


def condemned(situation: Situation) -> set[str]:
    """Return the machines that go into quarantine by the losses still to be written."""
    roster, policy, leader_state = situation.roster, situation.policy, situation.leader_state
    if not policy.flaps:
        return set()
    places = set()
    for loss in leader_state.losses:
        flap = roster.flaps.get(loss.place)
        counted = flap.count if flap else 0
        if counted + (flap is None or flap.id != loss.id) >= policy.flaps:
            places.add(loss.place)
    return places


def write_flap(situation: Situation) -> acts.Fenced | None:
    """Return the write that counts the next loss, or keeps its machine out; None if all are counted."""
    view, roster, policy, leader_state = situation.view, situation.roster, situation.policy, situation.leader_state
    while leader_state.losses and policy.flaps:
        loss = leader_state.losses[0]
        flap = roster.flaps.get(loss.place)
        if flap is None or flap.id != loss.id:
            more = Flap(id=loss.id, count=(flap.count if flap else 0) + 1)
            return acts.PutFlap(place=loss.place, flap=more, seconds=policy.flap_memory, token=view.token)
        if flap.count >= policy.flaps and loss.place not in roster.quarantines:
            reason = f"lost {flap.count} times within {policy.flap_memory:g} s"
            kept = Quarantine(seconds=policy.kept_out(flap.count), reason=reason, by=view.me.node.name)
            return acts.PutQuarantine(place=loss.place, quarantine=kept, token=view.token)
        leader_state.losses.pop(0)
    return None
