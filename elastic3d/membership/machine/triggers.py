"""Why the sealed generation cannot go on: a node is out, or a node's trainers are."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.membership.machine import forming
from elastic3d.membership.machine.convictions import refused_itself, spike, training
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.records import Out
from elastic3d.membership.stalls import Verdict
from elastic3d.values import Cause

NAMED = 4
"""Most nodes whose trainers' words a generation's detail quotes."""

BOTH = 2.0
"""Seconds that others have to report, after the first did, which nodes they cannot connect to: it is known then which
node is part of most pairs, and a step may be made after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """Why the sealed generation must end at once. culprit: whose trainer it was; lost: nodes are gone.

    out: nodes whose code alone raised are put out. final: trying again cannot mend the error. verdict: why nothing
    moves.
    """

    cause: Cause
    detail: str
    culprit: str = ""
    lost: bool = False
    out: bool = False
    final: bool = False
    verdict: Verdict | None = None


def expired(situation: Situation) -> dict[str, str]:
    """Return active nodes whose lease is lost for good, with the evidence: nobody hears them.

    A lost lease is suspicion only. A neighbour on the ring that is registered and does not call the node silent vetoes;
    what this member hears itself counts in any case. But a veto gives the node time to register again, no more: one
    that has not done so within `Policy.orphan` has lost etcd alone and stopped its trainers long ago, and the others
    would wait for them for ever. And a veto protects a generation that trains: if trainers have lost a peer, or all
    others wait for the missing one to prepare, it has stopped, and there is nothing left to wait for.
    """
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    me = view.me.node.id
    evidence: dict[str, str] = {}
    if not roster.missing:
        return evidence
    ring = view.ring
    current = view.generation
    assert current is not None
    stands = bool(roster.reports.who("peer_lost", current.key))
    prepared = len(roster.reports.who("prepared", current.key))
    waits = prepared >= len(current.nodes) - len(roster.missing)
    for id, since in roster.missing.items():
        if id == me:
            continue
        patience = policy.grace if since >= leader_state.leading + policy.lease else policy.lease + policy.grace
        if not alarm.due(since + patience):
            continue
        near = ring.around(id, view.tombs)
        reports = ((other, roster.reports.get(other)) for other in near if other in roster.members or other == me)
        if not any(report is not None and id not in report.silent for _, report in reports):
            evidence[id] = "its lease ran out, and no neighbour hears it"
        elif stands or (waits and view.sealed_at > since):
            evidence[id] = "its lease ran out, it did not register again, and its trainers are gone"
        elif alarm.due(since + patience + policy.orphan):
            evidence[id] = f"its lease ran out, and it did not register again within {patience + policy.orphan:g} s"
    return evidence


def interruption(situation: Situation, lost: dict[str, str]) -> Interruption | None:
    """Return why the sealed generation must end at once, None if it need not. `lost`: dead, tombs under way."""
    view, roster, policy = situation.view, situation.roster, situation.policy
    leader_state, alarm = situation.leader_state, situation.alarm
    current, index = view.generation, view.index
    assert current is not None
    assert index is not None
    dead = sorted((index.node_ranks[id], id) for id in {*view.outs, *lost} if id in index.node_ranks)
    if dead:
        tombs = {id: view.tombs[id] for _, id in dead if id in view.tombs}
        left = len(tombs) == len(dead) and all(tomb.how is Out.LEFT for tomb in tombs.values())
        drained = left and all(tomb.detail for tomb in tombs.values())
        details = dict.fromkeys(tombs[id].detail if id in tombs else lost[id] for _, id in dead)
        evidence = "; ".join(detail for detail in details if detail)
        names = ", ".join(id.partition("@")[0] for _, id in dead)
        if len(tombs) == len(dead) and all(tomb.how is Out.FAILED for tomb in tombs.values()):
            return Interruption(cause=Cause.ERROR, detail=evidence, out=True)
        cause = Cause.DRAIN if drained else Cause.LEAVE if left else Cause.DEATH
        return Interruption(cause=cause, detail=names + (f": {evidence}" if evidence else ""), lost=not drained)
    key = current.key
    apart = _apart(situation)
    if apart:
        leader_state.apart = alarm.now if leader_state.apart is None else leader_state.apart
        if not alarm.due(leader_state.apart + BOTH):
            return None
        return Interruption(cause=Cause.QUARANTINE, detail=apart)
    leader_state.apart = None
    wrong = {id: one for id, one in training(situation).items() if id in roster.members}
    if wrong:
        names = ", ".join(map(_name, wrong))
        return Interruption(cause=Cause.LYING, detail=f"{names}: {next(iter(wrong.values())).detail}")
    for field, cause in (("error", Cause.ERROR), ("failed", Cause.FAILURE)):
        # A member that reports before it has registered again is heard once it has.
        said = [id for id in roster.reports.who(field, key) if id in index.node_ranks and id in roster.members]
        if said:
            culprit = min(said, key=lambda id: index.node_ranks[id])
            detail = roster.reports[culprit].detail
            name = culprit.partition("@")[0]
            if field == "error":
                final = any(roster.reports[id].final for id in said)
                if roster.reports[culprit].out_of_memory:
                    cause = Cause.OUT_OF_MEMORY
                return Interruption(cause=cause, detail=detail, culprit=culprit, final=final)
            return Interruption(cause=cause, detail=f"{name}: {detail}", culprit=culprit)
    if (spiked := spike(situation)) is not None:
        return Interruption(cause=Cause.SPIKE, detail=spiked.detail)
    # Trainers that lost a peer may have recorded why, and their nodes say it while others wait for a death.
    stuck = leader_state.standstill.verdict
    if stuck is not None and stuck.key == key and stuck.act:
        return Interruption(cause=Cause.STUCK, detail=stuck.detail, verdict=stuck)
    if roster.reports.who("left", key) and view.proposal is None:
        return Interruption(cause=Cause.DEATH, detail="the others had left for a membership that lost a node")
    refuses_itself = refused_itself(current)
    if not roster.reports.who("peer_lost", key) and not refuses_itself:
        leader_state.peer_lost = None
        return None
    leader_state.peer_lost = alarm.now if leader_state.peer_lost is None else leader_state.peer_lost
    if alarm.due(leader_state.peer_lost + policy.peer_lost):
        if refuses_itself and not roster.reports.who("peer_lost", key):
            return Interruption(cause=Cause.LYING, detail="it may have gone on from a state that does not count")
        detail = f"trainers lost each other, and nobody died{_said(roster, key)}"
        return Interruption(cause=Cause.FAILURE, detail=detail)
    return None


def _apart(situation: Situation) -> str:
    """Return, in words, which active nodes have to stand aside, "" for none or if the others would not do.

    If their trainers die meanwhile, that is not the failure of any node, nor of the script.
    """
    view, roster = situation.view, situation.roster
    if not any(view.active(id) for id in roster.apart) or not forming.suffice(situation, roster.eligible):
        return ""
    return "; ".join(
        f"{_name(id)} stands aside: no connection between it and {', '.join(map(_name, others))}"
        for id, others in roster.apart.items()
        if view.active(id)
    )


def _said(roster: Roster, key: str) -> str:
    """Return what the trainers that lost a peer said about it."""
    ids = sorted(roster.reports.who("peer_lost", key))
    said = [f"{_name(id)}: {roster.reports[id].detail}" for id in ids if roster.reports[id].detail]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f" ({'; '.join(said[:NAMED])}{more})" if said else ""


def _name(id: str) -> str:
    return id.partition("@")[0]
