"""What the leader, or who must judge it, does about the silent: wait, ask through etcd, or hold them for dead.

A silence that two members of main tell of (`partition`) must last for `Policy.confirm`. Otherwise the silent member is
asked by a doubt on the board, which it answers in its report: unanswered for `Policy.doubt`, and for as long as the
question took to get there, it is dead. If it answers, both sides live and cannot reach each other; after lease and
grace the leader's side wins. Whom nobody calls silent lives, and is not asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.generation_index import Ring
from elastic3d.membership.machine.partition import Cut, Suspect, cuts_of, made, suspects
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Doubt

NAMED = 8
"""Witnesses that the evidence names."""

ASK_AGAIN = 1.0
"""Seconds after which a doubt that did not appear on the board is put there again."""

PROVEN = 3.3
"""Seconds after which a connection that the ring has made would have been called silent if it were: the time that a
first beat may take, and the way of the report."""


@dataclass(slots=True)
class Silence:
    """Since when the judge suspects whom, and when it asked, by a question's mark; kept by the core between questions.

    main: since when the judge stands in main all the time, as seen from the suspect.
    pending: of somebody it will be known soon whether it is dead.
    """

    since: dict[str, float] = field(default_factory=dict)
    main: dict[str, float] = field(default_factory=dict)
    asked: dict[str, dict[str, float]] = field(default_factory=dict)
    doubts: int = 0
    pending: bool = False
    _rings: list[tuple[Ring, float]] = field(default_factory=list)
    _found: tuple[Suspect, ...] = ()
    _key: tuple[Ring, Ring | None, frozenset[str], frozenset[str], frozenset[Cut]] | None = None

    def follow(self, view: View, now: float) -> None:
        """Take note of when the ring changed. To be called after all news."""
        ring = view.ring
        if not self._rings or self._rings[-1][0] is not ring:
            self._rings.append((ring, now))
        while len(self._rings) > 1 and self._rings[1][1] + PROVEN <= now:
            del self._rings[0]

    def suspects(self, view: View, roster: Roster, alarm: Alarm) -> tuple[Suspect, ...]:
        """Return who is cut off from this member's side. Costs the ring's length only when a silence came or went."""
        if not roster.reports.accusing:
            return ()
        ring, me = view.ring, view.me.node.id
        silent = ((id, other) for id in roster.reports.accusing for other in roster.reports[id].silent)
        out = frozenset(id for id in view.tombs if id in ring.index)
        ids, index = _closed(ring, out)
        cuts = cuts_of(ids, index, silent)
        before, gone = self._proven(view, alarm)
        key = (ring, before, out, gone, cuts)
        if self._key is None or self._key[0] is not ring or self._key[1] is not before or self._key[2:] != key[2:]:
            members = view.index
            fresh = frozenset[Cut]()
            if before is not ring or gone != out:
                fresh = made(ids, {} if before is None else _closed(before, gone)[1])
            self._found = suspects(ids, cuts, members.node_ranks if members is not None else {}, me, fresh)
            self._key = key
        return self._found

    def _proven(self, view: View, alarm: Alarm) -> tuple[Ring | None, frozenset[str]]:
        """Return the ring whose connections are proven by now, None if none is, and who was out of it by then."""
        (ring, since), *later = self._rings
        if later:
            alarm.due(later[0][1] + PROVEN)
        if not alarm.due(since + PROVEN):
            return None, frozenset()
        return ring, frozenset(id for id, at in view.tombs_at.items() if id in ring.index and alarm.due(at + PROVEN))

    def took(self, id: str, mark: str, seen: float) -> float:
        """Return the seconds in which this question came to be `seen`: the answer may take as long. Others' took 0."""
        return max(0.0, seen - self.asked.get(id, {}).get(mark, seen))


def _closed(ring: Ring, out: frozenset[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the ids of the ring as it closes around those that are out, and their index."""
    if not out:
        return ring.ids, ring.index
    ids = tuple(id for id in ring.ids if id not in out)
    return ids, {id: at for at, id in enumerate(ids)}


def judge(
    view: View, roster: Roster, policy: Policy, silence: Silence, alarm: Alarm, only: str = ""
) -> tuple[dict[str, str], list[acts.Write]]:
    """Return who is dead for silence, with the evidence, and the doubts to put up. `only`: the leader, which this
    member judges; of the others those alone are of concern who are cut off together with it.
    """
    found = silence.suspects(view, roster, alarm)
    there = {s.id for s in found}
    for id in [id for id in silence.since if id not in there]:
        del silence.since[id]
        silence.asked.pop(id, None)
        silence.main.pop(id, None)
    dead: dict[str, str] = {}
    doubts: list[acts.Write] = []
    silence.pending = False
    for suspect in found:
        id = suspect.id
        since = silence.since.setdefault(id, alarm.now)
        if suspect.main:
            silence.main.setdefault(id, alarm.now)
        else:
            silence.main.pop(id, None)
        if only and id != only and not suspect.sure:
            continue
        names = ", ".join(w.partition("@")[0] for w in suspect.witnesses[:NAMED])
        evidence = f"cut off from {names}" if names else "its neighbours hear it, and it does not hear them"
        if suspect.sure:
            if alarm.due(silence.main[id] + policy.confirm):
                dead[id] = evidence
            else:
                silence.pending = True
            continue
        doubt, report = view.doubts.get(id), roster.reports.get(id)
        if doubt is not None and view.doubts_at[id] >= since:
            if report is not None and report.answered == doubt.mark:
                if not only and alarm.due(since + policy.lease + policy.grace):
                    dead[id] = f"{evidence}, though it reaches etcd; the leader's side goes on"
            elif alarm.due(view.doubts_at[id] + policy.doubt + silence.took(id, doubt.mark, view.doubts_at[id])):
                dead[id] = f"{evidence}, and no answer through etcd"
            else:
                silence.pending = True
        elif not names:
            if not only and alarm.due(since + policy.lease + policy.grace):
                dead[id] = f"{evidence}; the leader's side goes on"
        elif not suspect.asked:
            if not only and alarm.due(since + policy.lease + policy.grace):
                dead[id] = f"on a side that is {evidence}"
        elif suspect.more and not alarm.due(since + policy.confirm):
            silence.pending = True
        elif id not in silence.asked or alarm.due(max(silence.asked[id].values()) + ASK_AGAIN):
            silence.doubts += 1
            me = view.me.node
            mark = f"{me.incarnation}.{silence.doubts}"
            silence.asked.setdefault(id, {})[mark] = alarm.now
            alarm.due(alarm.now + ASK_AGAIN)
            doubts.append(acts.PutDoubt(id=id, doubt=Doubt(mark=mark, by=me.id)))
    return dead, doubts
