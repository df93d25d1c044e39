"""What the leader decides: a pure function of what it knows and of `now`.

At most one write is decided at a time; the core asks again when it is answered. The order of the questions is the order
of importance: is the job over, must it re-form now, should it change as planned, has somebody to be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic3d.errors import LayoutError
from elastic3d.membership import events as e
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import End, MemberRecord, Out, Proposal, Tomb
from elastic3d.membership.view import Present, View
from elastic3d.planner import Plan
from elastic3d.values import Cause, Generation, Layout, Node

RETRY_PROPOSAL = 5.0
"""Seconds before a membership whose preparation failed is proposed again."""

Planner = Callable[[int, MemberRecord], Plan]
"""(number of nodes, the leader's own record) -> plan; raises LayoutError where none fits."""


@dataclass(slots=True)
class Timers:
    """Since when the leader has seen what it waits for; kept by the core between questions."""

    missing: dict[str, float]
    below: float | None = None
    unplanned: float | None = None
    orphan: float | None = None
    interrupted: float | None = None
    proposed: float | None = None
    not_before: float = 0.0
    leading: float = 0.0
    attempt: int = 0

    def next_attempt(self) -> int:
        """Return a number no other attempt of this job has.

        A leader counts from its token: tokens are etcd revisions, and each attempt costs a write, so that a later
        leader's token is beyond all numbers of the earlier ones.
        """
        self.attempt += 1
        return self.attempt


def decide(
    view: View, me: MemberRecord, policy: Policy, planner: Planner, timers: Timers, heard: frozenset[str], now: float
) -> e.Write | None:
    """Return the leader's next write, None when all is as it should be.

    `heard` names members whose heartbeat this member hears itself.
    """
    if view.end is not None:
        return None
    stranger = next((p for p in view.members.values() if _refusal(p, me) and not _buried(view, p)), None)
    if stranger is not None:
        tomb = Tomb(incarnation=stranger.node.incarnation, how=Out.REFUSED, detail=_refusal(stranger, me))
        return e.Bury(name=stranger.node.name, tomb=replace(tomb, by=me.node.name))
    current = view.generation
    # Without nodes it is what an earlier job under this id left: its number, to go on from.
    if current is None or not current.nodes:
        return _first(view, me, policy, planner, timers, now)
    reports = {node.name: view.report(node) for node in current.nodes}
    if all(report is not None and report.finished == current.key for report in reports.values()):
        return e.PutEnd(end=End(failed=False), token=view.token)
    urgent = _urgent(view, policy, timers, heard, now)
    if urgent is not None:
        return _reform(view, me, policy, planner, timers, urgent, now)
    timers.below = timers.orphan = None
    if any(report is not None and report.finished == current.key for report in reports.values()):
        return e.Withdraw(token=view.token) if view.proposal else None
    return _planned(view, me, policy, planner, timers, now)


def _refusal(member: Present, me: MemberRecord) -> str:
    mine, theirs = me.profile, member.record.profile
    if len(member.node.slots) != len(me.node.slots):
        return (
            f"this node has {len(member.node.slots)} slot(s), the job's nodes have {len(me.node.slots)}: "
            "start every node with the same --nproc-per-node"
        )
    if (mine.digest if mine else "") != (theirs.digest if theirs else ""):
        return (
            "this node's model, batch sizes or seed differ from those of the job that runs under this run id: "
            "start it with the same script and arguments, or choose another --rdzv-id"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Urgent:
    cause: Cause
    detail: str


def _urgent(view: View, policy: Policy, timers: Timers, heard: frozenset[str], now: float) -> _Urgent | None:
    """Return why the sealed generation must end at once, None if it need not."""
    assert view.generation is not None
    current = view.generation
    dead = frozenset(node.name for node in current.nodes if view.is_out(node)) | _expired(
        view, policy, timers, heard, now
    )
    if dead:
        tombs = [view.tombs[name] for name in sorted(dead) if name in view.tombs]
        left = all(tomb.how is Out.LEFT for tomb in tombs) and len(tombs) == len(dead)
        evidence = "; ".join(tomb.detail for tomb in tombs if tomb.detail)
        detail = ", ".join(sorted(dead)) + (f": {evidence}" if evidence else "")
        return _Urgent(cause=Cause.LEAVE if left else Cause.DEATH, detail=detail)
    interrupted = False
    for node in current.nodes:
        report = view.report(node)
        if report is None:
            continue
        if report.left == current.key and view.proposal is None:
            return _Urgent(cause=Cause.DEATH, detail="a newcomer was lost while the others made room for it")
        if report.error == current.key:
            return _Urgent(cause=Cause.ERROR, detail=report.detail)
        if report.fault == current.key:
            return _Urgent(cause=Cause.FAULT, detail=f"{node.name}: {report.detail}")
        interrupted = interrupted or report.interrupted == current.key
    if not interrupted:
        timers.interrupted = None
    elif timers.interrupted is None:
        timers.interrupted = now
    elif now - timers.interrupted >= policy.interrupted:
        return _Urgent(cause=Cause.FAULT, detail="trainers lost each other, and nobody says why")
    return None


def _expired(view: View, policy: Policy, timers: Timers, heard: frozenset[str], now: float) -> frozenset[str]:
    """Return active nodes whose lease is lost for good: not registered again in time, and heard by nobody."""
    assert view.generation is not None
    out = set()
    vetoes = set(heard)
    for report in view.reports.values():
        vetoes.update(report.hears)
    missing = {node.name for node in view.generation.nodes if node.name not in view.members}
    for name in [name for name in timers.missing if name not in missing]:
        del timers.missing[name]
    for name in missing:
        since = timers.missing.setdefault(name, now)
        patience = policy.grace if since >= timers.leading + policy.lease else policy.lease + policy.grace
        if name not in vetoes and now - since >= patience:
            out.add(name)
    return frozenset(out)


def _candidates(view: View) -> list[Present]:
    """Return who could be active, in order: members of the present generation first, then by arrival.

    A node that came back under its name is one of them, whatever became of its earlier incarnation.
    """
    current = [node.name for node in view.generation.nodes] if view.generation else []
    place = {name: at for at, name in enumerate(current)}
    there = [p for p in view.members.values() if not _buried(view, p)]
    return sorted(
        there, key=lambda p: (not view.active(p.node.name, p.node.incarnation), place.get(p.node.name, 0), p.order)
    )


def _buried(view: View, member: Present) -> bool:
    tomb = view.tombs.get(member.node.name)
    return tomb is not None and tomb.incarnation == member.node.incarnation


def arrange(previous: Generation | None, chosen: list[Node]) -> tuple[Node, ...]:
    """Return `chosen` in rank order: survivors keep theirs, newcomers fill the holes the others left."""
    if previous is None:
        return tuple(chosen)
    by_name = {(node.name, node.incarnation): node for node in chosen}
    places: list[Node | None] = [by_name.pop((old.name, old.incarnation), None) for old in previous.nodes]
    newcomers = [node for node in chosen if (node.name, node.incarnation) in by_name]
    filled = [place if place is not None else (newcomers.pop(0) if newcomers else None) for place in places]
    return tuple(node for node in filled if node is not None) + tuple(newcomers)


def _form(view: View, me: MemberRecord, policy: Policy, planner: Planner, candidates: list[Present]) -> Generation:
    """Return the next generation of these candidates, cause to be filled in; LayoutError where no layout fits."""
    nodes = [p.node for p in candidates]
    layout: Layout | None = None
    used = min(len(nodes), policy.maximum)
    if me.profile is not None:
        plan = planner(used, me)
        layout, used = plan.layout, plan.nodes
    number = max(view.generation.number if view.generation else 0, *(p.record.floor for p in candidates), 0) + 1
    return Generation(
        number=number,
        cause=Cause.START,
        nodes=arrange(view.generation, nodes[:used]),
        spares=tuple(nodes[used:]),
        layout=layout,
        leader=me.node.name,
        job=me.profile.digest if me.profile else "",
    )


def _seal(view: View, generation: Generation) -> e.Seal:
    return e.Seal(generation=generation, token=view.token, previous=view.generation_revision)


def _first(
    view: View, me: MemberRecord, policy: Policy, planner: Planner, timers: Timers, now: float
) -> e.Write | None:
    candidates = _candidates(view)
    if _too_few(len(candidates), policy, timers, now):
        return _below(view, len(candidates), policy, timers, now)
    if len(candidates) < policy.maximum and now - view.newest_join < policy.first_gather:
        return None
    try:
        formed = _form(view, me, policy, planner, candidates)
    except LayoutError as error:
        return _without_layout(view, error, policy, timers, now)
    timers.unplanned = None
    return _seal(view, replace(formed, attempt=timers.next_attempt()))


def _too_few(count: int, policy: Policy, timers: Timers, now: float) -> bool:
    if count >= policy.minimum:
        timers.below = None
        return False
    if timers.below is None:
        timers.below = now
    return True


def _below(view: View, count: int, policy: Policy, timers: Timers, now: float) -> e.Write | None:
    assert timers.below is not None
    if now - timers.below < policy.below_minimum:
        return None
    detail = (
        f"{count} node(s) for {policy.below_minimum:g} s, the minimum is {policy.minimum}: "
        "start more nodes, lower --nnodes, or raise --rdzv-conf=timeout"
    )
    return e.PutEnd(end=End(failed=True, detail=detail), token=view.token)


def _without_layout(view: View, error: LayoutError, policy: Policy, timers: Timers, now: float) -> e.Write | None:
    """No layout fits these nodes: wait for others as below the minimum, then fail with the planner's words."""
    if timers.unplanned is None:
        timers.unplanned = now
    if now - timers.unplanned < policy.below_minimum:
        return None
    return e.PutEnd(end=End(failed=True, detail=str(error)), token=view.token)


def _reform(
    view: View, me: MemberRecord, policy: Policy, planner: Planner, timers: Timers, urgent: _Urgent, now: float
) -> e.Write | None:
    """Seal a new generation at once, without waiting for anybody but the minimum."""
    current = view.generation
    assert current is not None
    if urgent.cause is Cause.ERROR and not policy.beside:
        return e.PutEnd(end=End(failed=True, detail=urgent.detail), token=view.token)
    # Where torchrun restarts the workers, it counts the tries.
    own = urgent.cause in (Cause.ERROR, Cause.FAULT) and policy.beside
    step = max((r.step for r in view.reports.values()), default=0)
    tries = 0 if not own else (current.tries + 1 if step <= current.tried_at else 1)
    if own and tries >= policy.tries:
        return e.PutEnd(end=End(failed=True, detail=urgent.detail), token=view.token)
    candidates = _candidates(view)
    if not any(view.active(p.node.name, p.node.incarnation) for p in candidates):
        timers.orphan = now if timers.orphan is None else timers.orphan
        if now - timers.orphan < policy.orphan:
            return None
    if _too_few(len(candidates), policy, timers, now):
        return _below(view, len(candidates), policy, timers, now)
    try:
        formed = _form(view, me, policy, planner, candidates)
    except LayoutError as error:
        return _without_layout(view, error, policy, timers, now)
    timers.unplanned = None
    return _seal(
        view,
        replace(
            formed,
            attempt=timers.next_attempt(),
            cause=urgent.cause,
            detail=urgent.detail[:2000],
            tries=tries,
            tried_at=step if own else current.tried_at,
        ),
    )


def _planned(
    view: View, me: MemberRecord, policy: Policy, planner: Planner, timers: Timers, now: float
) -> e.Write | None:
    """Take in newcomers when a better membership comes of it."""
    current = view.generation
    assert current is not None
    if view.proposal is not None and view.proposal.generation.number == current.number + 1:
        return _drive(view, view.proposal, policy, timers, now)
    known = {(node.name, node.incarnation) for node in (*current.nodes, *current.spares)}
    newcomers = [p for p in view.members.values() if (p.node.name, p.node.incarnation) not in known]
    # Whoever lost its lease is not known to be dead: a plan without it would seal it out before its grace is over.
    whole = all(view.is_registered(node) for node in current.nodes)
    if not newcomers or not whole or now - view.newest_join < policy.gather or now < timers.not_before:
        return None
    try:
        formed = _form(view, me, policy, planner, _candidates(view))
    except LayoutError:
        return None
    if {node.name for node in formed.nodes} == {node.name for node in current.nodes}:
        return None
    joined = sorted(node.name for node in formed.nodes if node not in current.nodes)
    attempt = timers.next_attempt()
    formed = replace(formed, cause=Cause.JOIN, detail=", ".join(joined), attempt=attempt, tried_at=current.tried_at)
    if not policy.beside:
        return _seal(view, formed)
    timers.proposed = now
    return e.Propose(proposal=Proposal(generation=formed), token=view.token, previous=view.generation_revision)


def _drive(view: View, proposal: Proposal, policy: Policy, timers: Timers, now: float) -> e.Write | None:
    """Bring a proposal to its seal: all prepared, then all left, then sealed; withdraw it when it cannot come."""
    current, formed = view.generation, proposal.generation
    assert current is not None
    timers.proposed = now if timers.proposed is None else timers.proposed
    lost = any(view.is_out(node) or not view.is_registered(node) for node in formed.nodes)
    reports = [view.report(node) for node in formed.nodes]
    failed = any(report is not None and formed.key in (report.fault, report.error) for report in reports)
    if lost or failed or now - timers.proposed > policy.prepare:
        timers.proposed, timers.not_before = None, now + RETRY_PROPOSAL
        return e.Withdraw(token=view.token)
    if not proposal.switch:
        if all(report is not None and report.prepared == formed.key for report in reports):
            switch = replace(proposal, switch=True)
            return e.Propose(proposal=switch, token=view.token, previous=view.generation_revision)
        return None
    leaving = [view.report(node) for node in current.nodes]
    if all(report is not None and report.left == current.key for report in leaving):
        timers.proposed = None
        return _seal(view, formed)
    return None
