"""Machines that lose their nodes again and again, or whose ranks hold all others up, and are kept out because of it.

A machine is kept out for its losses, or since its ranks stood still, only while enough nodes are left without it: it
trains most of the time, and the others alone would not train at all. One with a device that computes wrongly is kept
out at once, and even if too few are left: the job rather waits than trains on wrong numbers.
"""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine import forming
from elastic3d.membership.machine.convictions import liars
from elastic3d.membership.machine.leader_state import CountedLoss
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.triggers import Interruption
from elastic3d.membership.records import Flap, Quarantine
from elastic3d.values import Cause

STUCK = 2
"""Times that ranks of one machine hold all others up, within `Policy.flap_memory`, after which it is set aside."""

LYING = 86400.0
"""Seconds for which a machine is kept out because a device of it computes wrongly: time for somebody to look at it."""

WRONG = "a device of it computes wrongly"
"""Why."""


def count(situation: Situation, lost: dict[str, str]) -> None:
    """Put new losses of members that take part, or were about to, on the leader's list. `lost`: tombs under way."""
    view, leader_state = situation.view, situation.leader_state
    for id in (*view.fallen, *lost):
        place = view.place(id)
        if place is not None and id not in leader_state.counted:
            leader_state.counted[id] = None
            leader_state.losses.append(CountedLoss(id=id, place=place))


def blame(situation: Situation, why: Interruption) -> None:
    """Put a failure of one node on the list, and the nodes whose ranks hold the others up; `shut_out` has the liars.

    Where torchrun restarts the workers, it is not known whose a failure was.
    """
    view, policy, leader_state = situation.view, situation.policy, situation.leader_state
    if why.verdict is not None and not why.verdict.program:
        for id in why.verdict.culprits:
            _blame(situation, id)
    current, place = view.generation, view.place(why.culprit)
    if why.cause is Cause.FAILURE and current is not None and place is not None and policy.beside:
        failure = f"{why.culprit}/{current.key}"
        if failure not in leader_state.counted:
            leader_state.counted[failure] = None
            leader_state.losses.append(CountedLoss(id=failure, place=place))


def condemned(situation: Situation) -> set[str]:
    """Return the machines that go into quarantine by the losses still to be written."""
    roster, policy, leader_state = situation.roster, situation.policy, situation.leader_state
    places = {loss.place for loss in leader_state.losses if loss.lying}
    for loss in leader_state.losses if policy.flaps else ():
        flap = roster.flaps.get(loss.place)
        new = flap is None or flap.id != loss.id
        if loss.lying:
            continue
        if loss.stuck:
            again = (flap.stuck if flap else 0) + new >= STUCK
            if again and _dispensable(situation, {*places, loss.place}):
                places.add(loss.place)
        elif (flap.count if flap else 0) + new >= policy.flaps and _dispensable(situation, {*places, loss.place}):
            places.add(loss.place)
    return places


def _blame(situation: Situation, culprit: str) -> None:
    """Count the standstill of this generation against a node."""
    view, leader_state = situation.view, situation.leader_state
    current, place = view.generation, view.place(culprit)
    failure = f"{culprit}/{current.key}" if current is not None else ""
    if failure and place is not None and failure not in leader_state.counted:
        leader_state.counted[failure] = None
        leader_state.losses.append(CountedLoss(id=failure, place=place, stuck=True))


def _dispensable(situation: Situation, places: set[str]) -> bool:
    """Return whether enough nodes are left without those of these machines, with a layout that fits them."""
    roster = situation.roster
    return forming.suffice(situation, [id for id in roster.eligible if roster.members[id].node.place not in places])


def shut_out(situation: Situation) -> acts.Fenced | None:
    """Return the write that keeps out a machine that computes wrongly; None if all such are, for `LYING` at least.

    It comes before the generation that is formed without it, whatever that is formed for: a leader that dies between
    the two leaves the reports to the next one, which then knows; who was left out of a generation, and why, it could
    not tell.
    """
    view, roster = situation.view, situation.roster
    leader_state = situation.leader_state
    for id, conviction in liars(situation).items():
        failure = f"{id}/{conviction.key}"
        if failure not in leader_state.counted:
            leader_state.counted[failure] = None
            leader_state.losses.append(CountedLoss(id=failure, place=conviction.place, lying=True))
    for loss in leader_state.losses:
        kept = roster.quarantines.get(loss.place)
        # One for something else, which ends sooner, must not let it in again.
        if loss.lying and (kept is None or kept.seconds < LYING):
            out = Quarantine(seconds=LYING, reason=WRONG, by=view.me.node.name)
            return acts.PutQuarantine(place=loss.place, quarantine=out, token=view.token)
    return None


def write_flap(situation: Situation) -> acts.Fenced | None:
    """Return the write that counts the next loss, or keeps its machine out; None if all are counted."""
    view, roster, policy, leader_state = situation.view, situation.roster, situation.policy, situation.leader_state
    while leader_state.losses:
        loss = leader_state.losses[0]
        if loss.lying and (kept := shut_out(situation)) is not None:
            return kept
        if loss.lying or not policy.flaps:
            leader_state.losses.pop(0)
            continue
        flap = roster.flaps.get(loss.place)
        if flap is None or flap.id != loss.id:
            count, stuck = (flap.count, flap.stuck) if flap else (0, 0)
            more = Flap(id=loss.id, count=count + (not loss.stuck), stuck=stuck + loss.stuck)
            return acts.PutFlap(place=loss.place, flap=more, seconds=policy.flap_memory, token=view.token)
        out = None if loss.place in roster.quarantines else _kept_out(situation, loss, flap)
        if out is not None:
            return acts.PutQuarantine(place=loss.place, quarantine=out, token=view.token)
        leader_state.losses.pop(0)
    return None


def _kept_out(situation: Situation, loss: CountedLoss, flap: Flap) -> Quarantine | None:
    """Return for how long a machine is kept out for its losses, None if it is not."""
    policy, by = situation.policy, situation.view.me.node.name
    if not loss.stuck and flap.count >= policy.flaps and _dispensable(situation, {loss.place}):
        reason = f"lost {flap.count} times within {policy.flap_memory:g} s"
        return Quarantine(seconds=policy.kept_out(flap.count), reason=reason, by=by)
    if loss.stuck and flap.stuck >= STUCK and _dispensable(situation, {loss.place}):
        reason = f"its ranks held all others up {flap.stuck} times within {policy.flap_memory:g} s"
        return Quarantine(seconds=policy.kept_out(policy.flaps + flap.stuck - STUCK), reason=reason, by=by)
    return None
