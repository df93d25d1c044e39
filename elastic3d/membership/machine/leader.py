"""What the leader decides: a pure function of what it knows and of the time.

The questions come in order of importance: is the job over, which members have to be buried, must it re-form now, should
it change as planned, what is left to tidy up. At most one fenced write is decided at a time; the core asks again when
it is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from elastic3d.distrust import refused
from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership.machine import drains, forming
from elastic3d.membership.machine.balance import balance
from elastic3d.membership.machine.chores import chore
from elastic3d.membership.machine.convictions import distrust, goes_back, note, refused_itself, vouched
from elastic3d.membership.machine.damping import calm, spent, storm
from elastic3d.membership.machine.evictions import TOGETHER, evict
from elastic3d.membership.machine.failure_detector import judge
from elastic3d.membership.machine.flaps import blame, condemned, count, shut_out
from elastic3d.membership.machine.memory_bounds import acted, lower, reported
from elastic3d.membership.machine.planned import planned
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.script_errors import Raising, raised_in, raising
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.standstill import report, standing
from elastic3d.membership.machine.triggers import Interruption, expired, interruption
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import End, Out
from elastic3d.membership.stalls import Verdict, after_step
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Cause, Generation

COMMIT_LIMIT = 240.0
"""Seconds that the store has for the last commit of a run, all retries included."""

HUNG = 2
"""Times that the script itself stands still, without a step in between, after which the job ends."""


def decide(
    situation: Situation,
    *,
    ready: bool,
    hindered: bool,
) -> list[acts.Write]:
    """Return the leader's next writes, none when all is as it should be.

    At most one of them is fenced: the last, and only if `ready`. hindered: etcd takes no writes, so that members that
    are not registered, or say nothing, may be unable to.
    """
    view, leader_state, alarm = situation.view, situation.leader_state, situation.alarm
    if view.end is not None:
        return []
    leader_state.turn_to(view.generation_revision)
    if hindered:
        leader_state.wait_longer(float("inf"), alarm.now)
    dead, writes = judge(situation)
    missing = {} if hindered else expired(situation)
    # A missing member is lost once etcd has taken its tomb. If there are too many they get none.
    lost = dead if len(missing) <= TOGETHER else missing | dead
    raised = raising(situation)
    writes += evict(situation, lost, missing, raised.out)
    count(situation, lost | raised.out)
    fenced = _fenced(situation, lost, raised) if ready else None
    return [*writes, fenced] if fenced is not None else writes


def _fenced(
    situation: Situation,
    lost: dict[str, str],
    raised: Raising,
) -> acts.Fenced | None:
    view, roster, leader_state = situation.view, situation.roster, situation.leader_state
    current = view.generation
    # A record without nodes was left by an earlier job under this id: its number is the one to go on from.
    if current is None or not current.nodes:
        return _first(situation)
    if view.spoiled:
        return acts.Mend(generation=current, token=view.token, previous=view.generation_revision)
    helpless = roster.reports.who("unread", str(view.generation_revision)).keys() - leader_state.rewritten.keys()
    if helpless:
        # Once for each: a member that cannot read the whole record either is beyond help.
        leader_state.rewritten.update(dict.fromkeys(helpless))
        return acts.Mend(generation=current, token=view.token, previous=view.generation_revision)
    # Before a run that is through may end: what it has come to may be wrong.
    distrusted = distrust(situation)
    if distrusted is not None:
        return distrusted
    kept_out = shut_out(situation)
    if kept_out is not None:
        return kept_out
    finished = len(roster.reports.who("finished", current.key))
    if finished == len(current.nodes) and not refused_itself(current):
        return _over(situation)
    leader_state.ended = None
    why = interruption(situation, lost)
    if why is not None:
        if why.cause.of_script and raised.waiting:
            return None
        blame(situation, why)
        if why.cause.of_script and raised.out:
            why = replace(why, detail="; ".join(raised.out.values()), out=True)
        return _reform(situation, why, lost | raised.out)
    leader_state.below = leader_state.orphan = None
    noted = note(situation)
    if noted is not None:
        return noted
    if finished:
        return acts.Withdraw(token=view.token) if view.proposal else None
    due = report(situation) or _reached(view, roster) or planned(situation) or balance(situation)
    return due or chore(situation)


def _reached(view: View, roster: Roster) -> acts.Fenced | None:
    """Put into the record, once for the job, that a step was safe: no later leader begins at step 0 again."""
    current, safe = view.generation, roster.reports.safe()
    assert current is not None
    if current.reached or not safe or view.proposal is not None:
        return None
    if refused(current.distrusted, current.number, safe):
        # Said before a device was convicted that took part in it, by members that have not heard of that yet.
        return None
    reached = replace(current, reached=safe)
    return acts.Mend(generation=reached, token=view.token, previous=view.generation_revision, base=view.standing)


def _over(situation: Situation) -> acts.Fenced | None:
    """End the job, whose `main` has returned everywhere, once the store has answered about the last save."""
    view, leader_state, alarm = situation.view, situation.leader_state, situation.alarm
    leader_state.ended = alarm.now if leader_state.ended is None else leader_state.ended
    why = leader_state.uncommitted
    if leader_state.committing is not None:
        if not alarm.due(leader_state.ended + COMMIT_LIMIT):
            return None
        why = f"the store did not answer for {COMMIT_LIMIT:g} s"
    if not why:
        return acts.PutEnd(end=End(failed=False), token=view.token)
    detail = (
        f"the run is through, but its last step is not in a checkpoint: {why}. Nothing before the newest checkpoint is "
        "lost: see to the store and start the job again, it goes on from there"
    )
    return acts.PutEnd(end=End(failed=True, detail=detail), token=view.token)


def _first(situation: Situation) -> acts.Fenced | None:
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    if _too_few(situation, len(roster.eligible)):
        return _below(situation, len(roster.eligible))
    if len(roster.eligible) < policy.maximum and not alarm.due(roster.changed_at + policy.first_gather):
        return None
    there = forming.crowd(situation, set(), set())
    try:
        formed = forming.form(situation, there)
    except LayoutError as error:
        return _without_layout(situation, error)
    leader_state.unplanned = None
    return forming.seal(view, replace(formed, attempt=leader_state.next_attempt()))


def _reform(
    situation: Situation,
    why: Interruption,
    lost: dict[str, str],
) -> acts.Fenced | None:
    """Seal a new generation at once; wait only for the minimum of nodes, and in a storm for its next loss."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    current = view.generation
    assert current is not None
    if drains.everybody(roster) and drains.flushed(roster.draining, alarm):
        return drains.end(view)
    if why.cause.of_script and not policy.beside:
        return acts.PutEnd(end=End(failed=True, detail=why.detail), token=view.token)
    # Whatever ends the generation: a node that ran out of memory may have been followed by one that died.
    bound = acted(situation)
    # Where torchrun restarts the workers, it counts the tries.
    own = (why.cause.of_script or why.cause in (Cause.FAILURE, Cause.STUCK)) and policy.beside
    step = roster.reports.step() if own else 0
    tries = _tries(current, policy, why, step) if own else 0
    verdict = why.verdict
    hung = (current.hung if tries > 1 else 0) + (verdict is not None and verdict.program)
    rests_on = standing(situation, verdict) if verdict is not None else ()
    if verdict is not None:
        enough = tries >= policy.tries or (verdict.program and hung >= HUNG)
        if enough and not _set_aside(situation, verdict):
            end = End(failed=True, detail=_no_further(verdict, tries))
            return acts.PutEnd(end=end, token=view.token, verdict=verdict, standing=rests_on)
    elif own and not why.out and bound is None and (why.final or tries >= policy.tries):
        short = reported(situation, None)
        # What was missing is why the job ends, whatever the last trainer said of it; it is an event of the first try.
        lacks = short is not None and lower(situation) is None
        detail = f"{short.detail}\n{why.detail}" if short is not None and lacks else why.detail
        end = End(failed=True, detail=detail[:2000])
        return acts.PutEnd(end=end, token=view.token, verdict=short if tries == 1 else None)
    storms = storm(situation, why)
    if leader_state.suspicions.pending or not calm(situation, storms):
        return None
    there, formed, unfit = _formed(situation, lost, bound)
    if not any(view.active(p.node.id) for p in there.candidates):
        leader_state.orphan = alarm.now if leader_state.orphan is None else leader_state.orphan
        if not alarm.due(leader_state.orphan + policy.orphan):
            return chore(situation)
    if _too_few(situation, len(there.candidates)):
        return _below(situation, len(there.candidates)) or chore(situation)
    try:
        short = _short(situation, there, formed, tries) if formed is not None else None
    except LayoutError as error:
        unfit = error
    if formed is None or unfit is not None:
        assert unfit is not None
        return _without_layout(situation, unfit) or chore(situation)
    leader_state.unplanned = None
    # What needs less than what failed has not been tried before.
    tries = 0 if bound is not None else tries
    formed = replace(
        formed,
        attempt=leader_state.next_attempt(),
        cause=why.cause,
        detail=(f"{short.detail}\n{why.detail}" if short is not None else why.detail)[:2000],
        tries=tries,
        raised=_raised(view, roster, tries) if own else (),
        hung=hung if own else 0,
        tried_at=step if own else current.tried_at,
        spent=spent(situation),
        storm=storms,
    )
    formed = goes_back(formed, vouched(situation))
    return replace(forming.seal(view, formed), verdict=verdict or short, standing=rests_on)


def _formed(
    situation: Situation, lost: dict[str, str], bound: MemoryBound | None
) -> tuple[forming.Crowd, Generation | None, LayoutError | None]:
    """Return the members to go on with and the generation of them; without one, why no layout fits if they are enough.

    Those that are better left out take part where there are too few without them, or no layout fits the others.
    """
    policy, unfit = situation.policy, None
    crowds = _crowds(situation, set(lost))
    enough = there = next(crowds)
    while True:
        if policy.allowed(len(there.candidates)):
            try:
                return there, forming.form(situation, there, bound), None
            except LayoutError as error:
                enough, unfit = there, error
        following = next(crowds, None)
        if following is None:
            return (enough if unfit is not None else there), None, unfit
        there = following


def _crowds(situation: Situation, lost: set[str]) -> Iterator[forming.Crowd]:
    """Yield which members may be there, ever more of them."""
    places = condemned(situation)
    # A node that comes back to a machine which just lost one has to stand in the ring first, unless it is needed.
    fallen = places | set(situation.view.fallen.values())
    if fallen > places:
        yield forming.crowd(situation, lost, fallen)
    yield forming.crowd(situation, lost, places)
    # A node that has to leave may train until it does.
    yield forming.crowd(situation, lost, places, draining=True)
    if situation.roster.apart:
        # So may nodes that cannot reach one of the others: that may pass.
        yield forming.crowd(situation, lost, places, draining=True, apart=True)


def _tries(current: Generation, policy: Policy, why: Interruption, step: int) -> int:
    """Return how many generations in a row have ended without a step of progress, the present one included.

    Where a node was put out because its code raised in all tries, another one whose code raises is no first try
    (`script_errors`), but trainers that die or stand still are.
    """
    put_out = current.cause.of_script and current.tries >= policy.tries
    if step > current.tried_at or (put_out and not why.cause.of_script):
        return 1
    return current.tries + 1


def _short(situation: Situation, there: forming.Crowd, formed: Generation, tries: int) -> Verdict | None:
    """Return what is reported about memory that ran out: each rung, and once that there is none."""
    if acted(situation) is not None:
        return reported(situation, formed)
    bound = lower(situation)
    if bound is not None:
        return reported(situation, forming.form(situation, there, bound))
    return reported(situation, None) if tries <= 1 else None


def _set_aside(situation: Situation, verdict: Verdict) -> bool:
    """Return whether the next generation is formed without any of the nodes that hold the others up."""
    places = condemned(situation)
    return bool(verdict.culprits) and all(situation.view.place(id) in places for id in verdict.culprits)


def _no_further(verdict: Verdict, tries: int) -> str:
    """Return why the job ends, and what to do."""
    again = "tries=1 allows no other try"
    if tries > 1:
        times = "once" if tries == 2 else f"{tries - 1} times"
        again = f"all trainers were started again {times}, and came to stand still again without a step in between"
    do = "mend the script" if verdict.program else "see to what is named there"
    return (
        f"nothing moves {after_step(verdict.step)}: {verdict.detail}; {again}. {do.capitalize()}, then start the job "
        "again. `elastic3d explain` shows who waits for whom"
    )


def _raised(view: View, roster: Roster, tries: int) -> tuple[str, ...]:
    """Return the ids whose code raised in the generations that `tries` counts, the one that ends included."""
    assert view.generation is not None
    before = view.generation.raised if tries > 1 else ()
    failed = [id for id in view.outs if id in view.tombs and view.tombs[id].how is Out.FAILED]
    return tuple(dict.fromkeys((*before, *raised_in(view, roster), *failed)))


def _too_few(situation: Situation, count: int) -> bool:
    policy, leader_state, alarm = situation.policy, situation.leader_state, situation.alarm
    if policy.allowed(count):
        leader_state.below = None
        return False
    leader_state.below = alarm.now if leader_state.below is None else leader_state.below
    leader_state.awaited = max(1, policy.minimum - count)
    return True


def _below(situation: Situation, count: int) -> acts.Fenced | None:
    view, policy, leader_state, alarm = situation.view, situation.policy, situation.leader_state, situation.alarm
    assert leader_state.below is not None
    if not alarm.due(leader_state.below + policy.below_minimum):
        return None
    detail = (
        f"{count} node(s) for {policy.below_minimum:g} s, {policy.counting()}: "
        "start more nodes, lower --nnodes, or raise --rdzv-conf=timeout"
    )
    return acts.PutEnd(end=End(failed=True, detail=detail), token=view.token)


def _without_layout(situation: Situation, error: LayoutError) -> acts.Fenced | None:
    """No layout fits these nodes: wait for others as below the minimum, then fail with the planner's words."""
    view, policy, leader_state, alarm = situation.view, situation.policy, situation.leader_state, situation.alarm
    leader_state.unplanned = alarm.now if leader_state.unplanned is None else leader_state.unplanned
    leader_state.unfit = str(error)
    if not alarm.due(leader_state.unplanned + policy.below_minimum):
        return None
    return acts.PutEnd(end=End(failed=True, detail=str(error)), token=view.token)
