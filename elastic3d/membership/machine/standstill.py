"""Nothing moves: what the leader's judge makes of the members' stalls.

A verdict holds as long as the stalls it rests on: the judge is asked again when one comes, goes or changes, and now and
then while they stand, because its deadlines pass meanwhile. It is about the sealed generation, and dies with it.

A stall that stands may be one that its member could not take back: while etcd is away for it, or was just now. So the
judge is not asked before everybody had time to write since the leader hears them without a gap. Such a gap is also a
time in which the leader itself did not run: silences do not grow by it, for nobody knows who else stood still then.
What remains is closed by etcd: a seal that rests on stalls fails if one of them was taken back
(`actions.Seal.standing`).
"""

from __future__ import annotations

import math

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.leader_state import Standstill
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.stalls import Verdict

ASK = 0.25
"""Seconds between two questions to the judge while nothing changes, for up to `MANY` stalls; more for more."""

MANY = 1000

HEARING = 3.0
"""Seconds that members have to take back a stall when they can write again, or when a new leader begins to listen."""

LATE = 1.0
"""Seconds after the time for which it wanted to be woken from which on a leader counts as not having run."""

NAMED = 16
"""Most stalls on which a seal is made conditional."""


def conclude(situation: Situation, *, hindered: bool) -> tuple[acts.Concluded, ...]:
    """Bring the verdict on the sealed generation up to date, and return what was not found before.

    hindered: etcd takes no writes, so that nobody can take a stall back.
    """
    view, roster, leader_state, alarm = situation.view, situation.roster, situation.leader_state, situation.alarm
    current, index = view.generation, view.index
    if current is None or index is None or not index.ids:
        return ()
    memory = leader_state.standstill
    if memory.key != current.key:
        memory = leader_state.standstill = Standstill(key=current.key)
    stalls = roster.stalls
    late = alarm.now - memory.due_at
    if late >= LATE:
        stalls.missed(late, alarm.now)
        memory.hears_from = alarm.now + min(late, HEARING)
    memory.due_at = math.inf
    count = stalls.count(current.key)
    # Where torchrun restarts the workers they are not ours, and nobody watches them.
    if situation.judge is None or not situation.policy.beside or not count or hindered:
        memory.verdict = None
        return ()
    hears_from = max(memory.hears_from, max(leader_state.leading, leader_state.able) + HEARING)
    if not alarm.due(hears_from):
        memory.verdict, memory.due_at = None, hears_from
        return ()
    news = memory.version != stalls.version and (memory.verdict is not None or count >= len(current.nodes))
    pause = ASK * max(1.0, count / MANY)
    if not alarm.due(memory.asked_at + pause) and not news:
        memory.due_at = memory.asked_at + pause
        return ()
    memory.asked_at, memory.version = alarm.now, stalls.version
    memory.due_at = alarm.now + pause
    alarm.due(memory.due_at)
    said = stalls.of(current.key, (id for id in index.ids if id not in view.tombs), alarm.now)
    verdict = situation.judge(current, said, alarm.now - stalls.changed_at) if said else None
    if verdict is not None and verdict.key != current.key:
        verdict = None
    memory.verdict = verdict
    if verdict is None or any(alike(verdict, known) for known in memory.concluded):
        return ()
    memory.concluded.append(verdict)
    return (acts.Concluded(verdict=verdict, stalls=said),)


def alike(one: Verdict, other: Verdict) -> bool:
    """Return whether two verdicts say the same, in whatever words."""
    return all(
        getattr(one, name) == getattr(other, name) for name in ("kind", "fault", "key", "culprits", "ranks", "act")
    )


def standing(situation: Situation, verdict: Verdict) -> tuple[tuple[str, int], ...]:
    """Return the stalls on which an action upon this verdict rests: the culprits', or some where there are none."""
    stalls = situation.roster.stalls
    return stalls.created((verdict.culprits or stalls.ids())[:NAMED])


def report(situation: Situation) -> acts.PutVerdict | None:
    """Return the write of a verdict upon which nothing is done, once; None if there is none."""
    memory = situation.leader_state.standstill
    verdict = memory.verdict
    if verdict is None or verdict.act or any(alike(verdict, known) for known in memory.written):
        return None
    memory.written.append(verdict)
    return acts.PutVerdict(verdict=verdict, token=situation.view.token)
