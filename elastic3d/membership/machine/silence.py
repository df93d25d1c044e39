"""What the leader, or who must judge it, does about the silent: wait, ask through etcd, or hold them for dead.

A silence that two members of main tell of (`suspicion`) must last for `Policy.confirm`. Otherwise the silent member is
asked by a doubt on the board, which it answers in its report: unanswered for `Policy.doubt`, it is dead. If it answers,
both sides live and cannot reach each other; after lease and grace the leader's side wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.roll import Roll
from elastic3d.membership.machine.suspicion import Cut, Suspect, cuts_of, suspects
from elastic3d.membership.machine.view import View
from elastic3d.membership.machine.world import Ring
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Doubt

NAMED = 8
"""Witnesses that the evidence names."""

ASK_AGAIN = 1.0
"""Seconds after which a doubt that did not appear on the board is put there again."""


@dataclass(slots=True)
class Silence:
    """Since when the judge suspects whom, and when it asked; kept by the core between questions.

    pending: of somebody it will be known soon whether it is dead.
    """

    since: dict[str, float] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    doubts: int = 0
    pending: bool = False
    _found: tuple[Suspect, ...] = ()
    _key: tuple[Ring, frozenset[str], frozenset[Cut]] | None = None

    def suspects(self, view: View, roll: Roll) -> tuple[Suspect, ...]:
        """Return who is cut off from this member's side. Costs the ring's length only when a silence came or went."""
        if not roll.reports.accusing:
            return ()
        ring, me = view.ring, view.me.node.id
        silent = ((id, other) for id in roll.reports.accusing for other in roll.reports[id].silent)
        out = frozenset(id for id in view.tombs if id in ring.index)
        if out:
            # Around those that are out the ring closes.
            ids = tuple(id for id in ring.ids if id not in out)
            index = {id: at for at, id in enumerate(ids)}
        else:
            ids, index = ring.ids, ring.index
        cuts = cuts_of(ids, index, silent)
        if self._key is None or self._key[0] is not ring or self._key[1:] != (out, cuts):
            world = view.world
            self._found = suspects(ids, cuts, world.index if world is not None else {}, me)
            self._key = (ring, out, cuts)
        return self._found


def judge(
    view: View, roll: Roll, policy: Policy, silence: Silence, alarm: Alarm, only: str = ""
) -> tuple[dict[str, str], list[acts.Write]]:
    """Return who is dead for silence, with the evidence, and the doubts to put up. `only`: the leader, which this
    member judges; of the others those alone are of concern who are cut off together with it.
    """
    found = silence.suspects(view, roll)
    there = {s.id for s in found}
    for id in [id for id in silence.since if id not in there]:
        del silence.since[id]
        silence.asked.pop(id, None)
    dead: dict[str, str] = {}
    doubts: list[acts.Write] = []
    silence.pending = False
    for suspect in found:
        id = suspect.id
        since = silence.since.setdefault(id, alarm.now)
        if only and id != only and not suspect.sure:
            continue
        names = ", ".join(w.partition("@")[0] for w in suspect.witnesses[:NAMED])
        evidence = f"cut off from {names}" if names else "apart by its own word alone"
        if suspect.sure:
            if alarm.due(since + policy.confirm):
                dead[id] = evidence
            else:
                silence.pending = True
            continue
        doubt, report = view.doubts.get(id), roll.reports.get(id)
        if doubt is not None and view.doubts_at[id] >= since:
            if report is not None and report.answered == doubt.mark:
                if not only and alarm.due(since + policy.lease + policy.grace):
                    dead[id] = f"{evidence}, though it reaches etcd; the leader's side goes on"
            elif alarm.due(view.doubts_at[id] + policy.doubt):
                dead[id] = f"{evidence}, and no answer through etcd"
            else:
                silence.pending = True
        elif not suspect.asked:
            if not only and alarm.due(since + policy.lease + policy.grace):
                dead[id] = f"on a side that is {evidence}"
        elif suspect.more and not alarm.due(since + policy.confirm):
            silence.pending = True
        elif id not in silence.asked or alarm.due(silence.asked[id] + ASK_AGAIN):
            silence.asked[id] = alarm.now
            silence.doubts += 1
            alarm.due(alarm.now + ASK_AGAIN)
            me = view.me.node
            doubts.append(acts.PutDoubt(id=id, doubt=Doubt(mark=f"{me.incarnation}.{silence.doubts}", by=me.id)))
    return dead, doubts
