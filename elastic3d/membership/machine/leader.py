"""What the leader decides: a pure function of what it knows and of the time.

The order of the questions is the order of importance: is the job over, who has to be buried, must it re-form now,
should it change as planned, what is left to tidy up. At most one fenced write is decided at a time; the core asks again
when it is answered.
"""

from __future__ import annotations

from dataclasses import replace

from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership.machine import drains, forming
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.chores import chore
from elastic3d.membership.machine.evictions import TOGETHER, evict
from elastic3d.membership.machine.failure_detector import judge
from elastic3d.membership.machine.forming import Planner
from elastic3d.membership.machine.leader_state import Lead
from elastic3d.membership.machine.losses import Urgent, blame, calm, condemned, count, expired, storm, urgent
from elastic3d.membership.machine.planned import planned, spent
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.script_errors import Raising, raised_in, raising
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import End, Out
from elastic3d.values import Cause

COMMIT_LIMIT = 240.0
"""Seconds that the store has for the last commit of a run, through all that is tried again."""


def decide(
    view: View, policy: Policy, planner: Planner, lead: Lead, alarm: Alarm, *, ready: bool, hindered: bool
) -> list[acts.Write]:
    """Return the leader's next writes, none when all is as it should be. The roll is there and listed.

    At most one of them is fenced, the last, and that only if `ready`. hindered: etcd takes no writes, so that who is
    not registered, or says nothing, may be unable to.
    """
    roll = view.roll
    assert roll is not None
    if view.end is not None:
        return []
    lead.turn_to(view.generation_revision)
    if hindered:
        lead.wait_longer(float("inf"), alarm.now)
    dead, writes = judge(view, roll, policy, lead.silence, alarm)
    missing = {} if hindered else expired(view, roll, policy, lead, alarm)
    # Who is missing is lost once etcd has taken the tomb. Too many of them get none.
    lost = dead if len(missing) <= TOGETHER else missing | dead
    raised = raising(view, roll, policy, lead, alarm)
    writes += evict(view, roll, lead, lost, missing, raised.out, alarm)
    count(view, lead, lost | raised.out)
    fenced = _fenced(view, roll, policy, planner, lead, lost, raised, alarm) if ready else None
    return [*writes, fenced] if fenced is not None else writes


def _fenced(
    view: View,
    roll: Roster,
    policy: Policy,
    planner: Planner,
    lead: Lead,
    lost: dict[str, str],
    raised: Raising,
    alarm: Alarm,
) -> acts.Fenced | None:
    current = view.generation
    # Without nodes it is what an earlier job under this id left: its number, to go on from.
    if current is None or not current.nodes:
        return _first(view, roll, policy, planner, lead, alarm)
    if view.spoiled:
        return acts.Mend(generation=current, token=view.token, previous=view.generation_revision)
    helpless = roll.reports.who("unread", str(view.generation_revision)).keys() - lead.rewritten.keys()
    if helpless:
        # Once for each: who cannot read the whole record either is beyond help.
        lead.rewritten.update(dict.fromkeys(helpless))
        return acts.Mend(generation=current, token=view.token, previous=view.generation_revision)
    finished = len(roll.reports.who("finished", current.key))
    if finished == len(current.nodes):
        return _over(view, lead, alarm)
    lead.ended = None
    why = urgent(view, roll, policy, lead, lost, alarm)
    if why is not None:
        if why.cause is Cause.ERROR and raised.waiting:
            return None
        blame(view, policy, lead, why)
        if why.cause is Cause.ERROR and raised.out:
            why = replace(why, detail="; ".join(raised.out.values()), out=True)
        return _reform(view, roll, policy, planner, lead, why, lost | raised.out, alarm)
    lead.below = lead.orphan = None
    if finished:
        return acts.Withdraw(token=view.token) if view.proposal else None
    return (
        _reached(view, roll)
        or planned(view, roll, policy, planner, lead, alarm)
        or chore(view, roll, policy, lead, alarm)
    )


def _reached(view: View, roll: Roster) -> acts.Fenced | None:
    """Put into the record, once for the job, that a step was safe: whoever leads later begins at step 0 no more."""
    current, safe = view.generation, roll.reports.safe()
    assert current is not None
    if current.reached or not safe or view.proposal is not None:
        return None
    reached = replace(current, reached=safe)
    return acts.Mend(generation=reached, token=view.token, previous=view.generation_revision, base=view.standing)


def _over(view: View, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    """End the job, whose `main` has returned everywhere, once the store has answered for the last save."""
    lead.ended = alarm.now if lead.ended is None else lead.ended
    why = lead.uncommitted
    if lead.committing is not None:
        if not alarm.due(lead.ended + COMMIT_LIMIT):
            return None
        why = f"the store did not answer for {COMMIT_LIMIT:g} s"
    if not why:
        return acts.PutEnd(end=End(failed=False), token=view.token)
    detail = (
        f"the run is through, but its last step is no checkpoint: {why}. Nothing is lost before the newest checkpoint: "
        "see to the store and start the job again, it goes on from there"
    )
    return acts.PutEnd(end=End(failed=True, detail=detail), token=view.token)


def _first(view: View, roll: Roster, policy: Policy, planner: Planner, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    if _too_few(len(roll.eligible), policy, lead, alarm):
        return _below(view, len(roll.eligible), policy, lead, alarm)
    if len(roll.eligible) < policy.maximum and not alarm.due(roll.changed_at + policy.first_gather):
        return None
    there = forming.crowd(view, roll, set(), set())
    try:
        formed = forming.form(view, view.me, policy, planner, there)
    except LayoutError as error:
        return _without_layout(view, error, policy, lead, alarm)
    lead.unplanned = None
    return forming.seal(view, replace(formed, attempt=lead.next_attempt()))


def _reform(
    view: View,
    roll: Roster,
    policy: Policy,
    planner: Planner,
    lead: Lead,
    why: Urgent,
    lost: dict[str, str],
    alarm: Alarm,
) -> acts.Fenced | None:
    """Seal a new generation at once, without waiting for anybody but the minimum, and in a storm for its next loss."""
    current = view.generation
    assert current is not None
    if drains.everybody(roll) and drains.flushed(roll.draining, alarm):
        return drains.end(view)
    if why.cause is Cause.ERROR and not policy.beside:
        return acts.PutEnd(end=End(failed=True, detail=why.detail), token=view.token)
    # Where torchrun restarts the workers, it counts the tries.
    own = why.cause in (Cause.ERROR, Cause.FAULT) and policy.beside
    step = roll.reports.step() if own else 0
    tries = 0 if not own else (current.tries + 1 if step <= current.tried_at else 1)
    if own and not why.out and (why.final or tries >= policy.tries):
        return acts.PutEnd(end=End(failed=True, detail=why.detail), token=view.token)
    storms = storm(view, why, lead, alarm.now)
    if lead.silence.pending or not calm(policy, lead, storms, alarm):
        return None
    places = condemned(roll, policy, lead)
    # Who comes back from where somebody was lost just now has to stand in the ring first, unless it is needed.
    fallen = places | set(view.fallen.values())
    there = forming.crowd(view, roll, set(lost), fallen)
    if fallen > places and not policy.allowed(len(there.candidates)):
        there = forming.crowd(view, roll, set(lost), places)
    if not policy.allowed(len(there.candidates)):
        # Who is to leave may train for as long as it is there.
        there = forming.crowd(view, roll, set(lost), places, draining=True)
    if roll.apart and not policy.allowed(len(there.candidates)):
        # So may those that cannot reach one of the others: it may pass.
        there = forming.crowd(view, roll, set(lost), places, draining=True, apart=True)
    if not any(view.active(p.node.id) for p in there.candidates):
        lead.orphan = alarm.now if lead.orphan is None else lead.orphan
        if not alarm.due(lead.orphan + policy.orphan):
            return chore(view, roll, policy, lead, alarm)
    if _too_few(len(there.candidates), policy, lead, alarm):
        return _below(view, len(there.candidates), policy, lead, alarm) or chore(view, roll, policy, lead, alarm)
    try:
        formed = forming.form(view, view.me, policy, planner, there)
    except LayoutError as error:
        return _without_layout(view, error, policy, lead, alarm) or chore(view, roll, policy, lead, alarm)
    lead.unplanned = None
    return forming.seal(
        view,
        replace(
            formed,
            attempt=lead.next_attempt(),
            cause=why.cause,
            detail=why.detail[:2000],
            tries=tries,
            raised=_raised(view, roll, tries) if own else (),
            tried_at=step if own else current.tried_at,
            spent=spent(view, policy, alarm.now),
            storm=storms,
        ),
    )


def _raised(view: View, roll: Roster, tries: int) -> tuple[str, ...]:
    """Return whose code raised in the generations that `tries` counts, the one that ends included."""
    assert view.generation is not None
    before = view.generation.raised if tries > 1 else ()
    failed = [id for id in view.outs if id in view.tombs and view.tombs[id].how is Out.FAILED]
    return tuple(dict.fromkeys((*before, *raised_in(view, roll), *failed)))


def _too_few(count: int, policy: Policy, lead: Lead, alarm: Alarm) -> bool:
    if policy.allowed(count):
        lead.below = None
        return False
    lead.below = alarm.now if lead.below is None else lead.below
    lead.awaited = max(1, policy.minimum - count)
    return True


def _below(view: View, count: int, policy: Policy, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    assert lead.below is not None
    if not alarm.due(lead.below + policy.below_minimum):
        return None
    detail = (
        f"{count} node(s) for {policy.below_minimum:g} s, {policy.counting()}: "
        "start more nodes, lower --nnodes, or raise --rdzv-conf=timeout"
    )
    return acts.PutEnd(end=End(failed=True, detail=detail), token=view.token)


def _without_layout(view: View, error: LayoutError, policy: Policy, lead: Lead, alarm: Alarm) -> acts.Fenced | None:
    """No layout fits these nodes: wait for others as below the minimum, then fail with the planner's words."""
    lead.unplanned = alarm.now if lead.unplanned is None else lead.unplanned
    if not alarm.due(lead.unplanned + policy.below_minimum):
        return None
    return acts.PutEnd(end=End(failed=True, detail=str(error)), token=view.token)
