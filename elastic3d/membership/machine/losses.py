"""Why the sealed generation cannot go on: somebody is out, or somebody's trainers are."""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.leader_state import CountedLoss, Lead
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Out
from elastic3d.values import Cause

NAMED = 4
"""Nodes whose trainers' words a generation's detail quotes."""

SOON = 10.0
"""A generation that a loss ends within these seconds belongs to a storm."""

BOTH = 2.0
"""Seconds in which others may say too whom they cannot connect to, once the first did: who is part of most pairs is
known then, and a step may be made after all."""

GROWTH = 0.2
"""Seconds a storm's second loss waits for a third; doubled with each further one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgent:
    """Why the generation must end at once. culprit: whose trainer it was; lost: nodes are gone.

    out: nodes whose code alone raised are put out. final: trying again cannot mend the error.
    """

    cause: Cause
    detail: str
    culprit: str = ""
    lost: bool = False
    out: bool = False
    final: bool = False


def expired(view: View, roll: Roster, policy: Policy, lead: Lead, alarm: Alarm) -> dict[str, str]:
    """Return active nodes whose lease is lost for good, with the evidence: nobody hears them.

    A lost lease is suspicion only. A neighbour on the ring that is registered and does not call the node silent vetoes;
    what this member hears itself counts in any case. But a veto gives the node time to register again, no more: who
    has not within `Policy.orphan` has lost etcd alone and stopped its trainers long ago, and the others would wait for
    them for ever. And it protects a generation that trains: where trainers have lost a peer, or all others wait for
    the one that is missing to prepare, it has stopped, and there is nothing left to wait for.
    """
    me = view.me.node.id
    found: dict[str, str] = {}
    if not roll.missing:
        return found
    ring = view.ring
    current = view.generation
    assert current is not None
    stands = bool(roll.reports.who("interrupted", current.key))
    prepared = len(roll.reports.who("prepared", current.key))
    waits = prepared >= len(current.nodes) - len(roll.missing)
    for id, since in roll.missing.items():
        if id == me:
            continue
        patience = policy.grace if since >= lead.leading + policy.lease else policy.lease + policy.grace
        if not alarm.due(since + patience):
            continue
        near = ring.around(id, view.tombs)
        reports = ((other, roll.reports.get(other)) for other in near if other in roll.members or other == me)
        if not any(report is not None and id not in report.silent for _, report in reports):
            found[id] = "its lease ran out, and no neighbour hears it"
        elif stands or (waits and view.sealed_at > since):
            found[id] = "its lease ran out, it did not register again, and its trainers are gone"
        elif alarm.due(since + patience + policy.orphan):
            found[id] = f"its lease ran out, and it did not register again within {patience + policy.orphan:g} s"
    return found


def urgent(view: View, roll: Roster, policy: Policy, lead: Lead, lost: dict[str, str], alarm: Alarm) -> Urgent | None:
    """Return why the sealed generation must end at once, None if it need not. `lost`: dead, tombs under way."""
    current, world = view.generation, view.world
    assert current is not None
    assert world is not None
    dead = sorted((world.index[id], id) for id in {*view.outs, *lost} if id in world.index)
    if dead:
        tombs = {id: view.tombs[id] for _, id in dead if id in view.tombs}
        left = len(tombs) == len(dead) and all(tomb.how is Out.LEFT for tomb in tombs.values())
        drained = left and all(tomb.detail for tomb in tombs.values())
        details = dict.fromkeys(tombs[id].detail if id in tombs else lost[id] for _, id in dead)
        evidence = "; ".join(detail for detail in details if detail)
        names = ", ".join(id.partition("@")[0] for _, id in dead)
        if len(tombs) == len(dead) and all(tomb.how is Out.FAILED for tomb in tombs.values()):
            return Urgent(cause=Cause.ERROR, detail=evidence, out=True)
        cause = Cause.DRAIN if drained else Cause.LEAVE if left else Cause.DEATH
        return Urgent(cause=cause, detail=names + (f": {evidence}" if evidence else ""), lost=not drained)
    key = current.key
    apart = _apart(view, roll, policy)
    if apart:
        lead.apart = alarm.now if lead.apart is None else lead.apart
        if not alarm.due(lead.apart + BOTH):
            return None
        return Urgent(cause=Cause.QUARANTINE, detail=apart)
    lead.apart = None
    for field, cause in (("error", Cause.ERROR), ("fault", Cause.FAULT)):
        # Whoever speaks before it has registered again is heard once it has.
        said = [id for id in roll.reports.who(field, key) if id in world.index and id in roll.members]
        if said:
            culprit = min(said, key=lambda id: world.index[id])
            detail = roll.reports[culprit].detail
            name = culprit.partition("@")[0]
            if field == "error":
                final = any(roll.reports[id].final for id in said)
                return Urgent(cause=cause, detail=detail, culprit=culprit, final=final)
            return Urgent(cause=cause, detail=f"{name}: {detail}", culprit=culprit)
    if roll.reports.who("left", key) and view.proposal is None:
        return Urgent(cause=Cause.DEATH, detail="the others had left for a membership that lost a node")
    if not roll.reports.who("interrupted", key):
        lead.interrupted = None
        return None
    lead.interrupted = alarm.now if lead.interrupted is None else lead.interrupted
    if alarm.due(lead.interrupted + policy.interrupted):
        return Urgent(cause=Cause.FAULT, detail=f"trainers lost each other, and nobody died{_said(roll, key)}")
    return None


def _apart(view: View, roll: Roster, policy: Policy) -> str:
    """Return which active nodes have to stand aside for whom, "" for none, or where too few would be left.

    What their trainers die of meanwhile is no fault of anybody's, nor of the code's.
    """
    if not any(view.active(id) for id in roll.apart) or not policy.allowed(len(roll.eligible)):
        return ""
    return "; ".join(
        f"{_name(id)} stands aside: no connection between it and {', '.join(map(_name, others))}"
        for id, others in roll.apart.items()
        if view.active(id)
    )


def _said(roll: Roster, key: str) -> str:
    """Return what the trainers that lost a peer said of it."""
    ids = sorted(roll.reports.who("interrupted", key))
    said = [f"{_name(id)}: {roll.reports[id].detail}" for id in ids if roll.reports[id].detail]
    more = f"; and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f" ({'; '.join(said[:NAMED])}{more})" if said else ""


def _name(id: str) -> str:
    return id.partition("@")[0]


def storm(view: View, why: Urgent, lead: Lead, now: float) -> int:
    """Return how many generations in a row a loss ended soon, this one included."""
    assert view.generation is not None
    if not why.lost:
        return 0
    lead.lost_at = now if lead.lost_at is None else lead.lost_at
    return view.generation.storm + 1 if lead.lost_at < view.sealed_at + SOON else 0


def calm(policy: Policy, lead: Lead, storms: int, alarm: Alarm) -> bool:
    """Return whether a storm has been given time to show its next loss; a single death waits for nothing."""
    if storms < 2 or lead.lost_at is None:
        return True
    return alarm.due(lead.lost_at + min(GROWTH * 2 ** min(storms - 1, 30), policy.damping))


def count(view: View, lead: Lead, lost: dict[str, str]) -> None:
    """Put new losses of those who take part, or were about to, on the leader's list. `lost`: tombs under way."""
    for id in (*view.fallen, *lost):
        place = view.place(id)
        if place is not None and id not in lead.counted:
            lead.counted[id] = None
            lead.losses.append(CountedLoss(id=id, place=place))


def blame(view: View, policy: Policy, lead: Lead, why: Urgent) -> None:
    """Put a fault of one node on the list. Where torchrun restarts the workers, whose fault it was is not known."""
    current, place = view.generation, view.place(why.culprit)
    if why.cause is Cause.FAULT and current is not None and place is not None and policy.beside:
        fault = f"{why.culprit}/{current.key}"
        if fault not in lead.counted:
            lead.counted[fault] = None
            lead.losses.append(CountedLoss(id=fault, place=place))


def condemned(roll: Roster, policy: Policy, lead: Lead) -> set[str]:
    """Return the machines that the losses still to be written put into quarantine."""
    if not policy.flaps:
        return set()
    places = set()
    for loss in lead.losses:
        flap = roll.flaps.get(loss.place)
        counted = flap.count if flap else 0
        if counted + (flap is None or flap.id != loss.id) >= policy.flaps:
            places.add(loss.place)
    return places
