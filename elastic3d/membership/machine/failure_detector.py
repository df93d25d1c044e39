"""What the leader, or a member that must judge it, does about the silent: wait, ask through etcd, or declare them dead.

A silence that two members of main report (`partition`) must last for `Policy.confirm`. Otherwise the silent member is
asked by a doubt on the board, which it answers in its report: it is dead if it has not answered within `Policy.doubt`
plus the time that the question took to get there. If it answers, both sides live and cannot reach each other; after
lease and grace the leader's side wins. A member that nobody calls silent lives, and is not asked.
"""

from __future__ import annotations

from elastic3d.membership import actions as acts
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import Doubt

NAMED = 8
"""Most witnesses that the evidence names."""

ASK_AGAIN = 1.0
"""Seconds after which a doubt that has not appeared on the board is put there again."""


def judge(situation: Situation, only: str = "") -> tuple[dict[str, str], list[acts.Write]]:
    """Return which members are dead because of silence, with the evidence, and the doubts to put up.

    only: the leader, if this member judges it; of the others only those matter that are cut off together with it.
    """
    view, roster, policy = situation.view, situation.roster, situation.policy
    alarm, suspicions = situation.alarm, situation.leader_state.suspicions
    suspects = suspicions.suspects(view, roster, alarm)
    there = {s.id for s in suspects}
    for id in [id for id in suspicions.since if id not in there]:
        del suspicions.since[id]
        suspicions.asked.pop(id, None)
        suspicions.main.pop(id, None)
    dead: dict[str, str] = {}
    doubts: list[acts.Write] = []
    suspicions.pending = False
    for suspect in suspects:
        id = suspect.id
        since = suspicions.since.setdefault(id, alarm.now)
        if suspect.main:
            suspicions.main.setdefault(id, alarm.now)
        else:
            suspicions.main.pop(id, None)
        if only and id != only and not suspect.sure:
            continue
        names = ", ".join(w.partition("@")[0] for w in suspect.witnesses[:NAMED])
        evidence = f"cut off from {names}" if names else "its neighbours hear it, and it does not hear them"
        if suspect.sure:
            if alarm.due(suspicions.main[id] + policy.confirm):
                dead[id] = evidence
            else:
                suspicions.pending = True
            continue
        doubt, report = view.doubts.get(id), roster.reports.get(id)
        if doubt is not None and view.doubts_at[id] >= since:
            if report is not None and report.answered == doubt.mark:
                if not only and alarm.due(since + policy.lease + policy.grace):
                    dead[id] = f"{evidence}, though it reaches etcd; the leader's side goes on"
            elif alarm.due(view.doubts_at[id] + policy.doubt + suspicions.took(id, doubt.mark, view.doubts_at[id])):
                dead[id] = f"{evidence}, and no answer through etcd"
            else:
                suspicions.pending = True
        elif not names:
            if not only and alarm.due(since + policy.lease + policy.grace):
                dead[id] = f"{evidence}; the leader's side goes on"
        elif not suspect.asked:
            if not only and alarm.due(since + policy.lease + policy.grace):
                dead[id] = f"on a side that is {evidence}"
        elif suspect.more and not alarm.due(since + policy.confirm):
            suspicions.pending = True
        elif id not in suspicions.asked or alarm.due(max(suspicions.asked[id].values()) + ASK_AGAIN):
            suspicions.doubts += 1
            me = view.me.node
            mark = f"{me.incarnation}.{suspicions.doubts}"
            suspicions.asked.setdefault(id, {})[mark] = alarm.now
            alarm.due(alarm.now + ASK_AGAIN)
            doubts.append(acts.PutDoubt(id=id, doubt=Doubt(mark=mark, by=me.id)))
    return dead, doubts
