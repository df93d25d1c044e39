"""Slow nodes: what is done about them, as a change that everybody leaves for at a step boundary.

No work is lost by it and no bit changes, so that it need not be certain that a node stays slow: a change is made once
what it would have saved so far equals what it costs (`planner.remedy`). What can be done:

    swap    a spare takes the place of a slow node, which becomes one
    recut   the stage of a slow node gets fewer blocks, or it trades places with a node of a lighter stage; once it is
            well again, the same way back. Of no use where its data loader or its network is slow
    shares  a slow node of a layout without stages gets fewer micro-batches of each step; once it is well, as many again
    evict   the others go on without it: only reported, since a node less is for a person to decide

A membership that is about to change for another reason changes first: it is planned for the speeds that are known, as
every generation is. Each change counts against the job's budget of re-formings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership.events import WriteDone
from elastic3d.membership.machine import forming
from elastic3d.membership.machine.damping import affordable, spent
from elastic3d.membership.machine.flaps import condemned
from elastic3d.membership.machine.leader_state import Balance, Remedy
from elastic3d.membership.machine.paces import delay_of, finding, known, slow_places, speeds_of
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.slowness import SpeedReport
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.pace import Pace, slow_ones
from elastic3d.planner import Plan
from elastic3d.planner.remedy import Rung, RungKind, choose
from elastic3d.values import Cause, Generation, Layout, Node

MANY = 16
"""Most nodes of a job whose order may change: planning takes a tenth of a second there, and other work waits."""

SAME = 0.03
"""Share of a step's time by which another order must be faster: it moves the state of nodes that are well."""

CHEAPEST = 1.0
"""Seconds that a change costs at least, whatever was measured."""

NAMED = 4
"""Most nodes that a change's detail names."""


def balance(situation: Situation) -> acts.Fenced | None:
    """Return the next write on account of slow nodes, None while there is none or it is not due yet."""
    view, roster, leader_state = situation.view, situation.roster, situation.leader_state
    policy, alarm = situation.policy, situation.alarm
    current, said = view.generation, finding(situation)
    # Where torchrun restarts the workers there are no boundaries to change at.
    if current is None or said is None or not policy.beside or view.me.profile is None or view.proposal is not None:
        return None
    # First comes whatever else changes the membership, and nobody is sealed out who may come back.
    if leader_state.considered != roster.version or roster.missing or any(view.active(id) for id in roster.apart):
        return None
    memory, paces = leader_state.balance, known(situation)
    concerned = _concerned(current, paces)
    if memory.key != current.key or memory.concerned != tuple(sorted(concerned)):
        failed = memory.failed if memory.concerned == tuple(sorted(concerned)) else 0
        memory = leader_state.balance = Balance(
            key=current.key, concerned=tuple(sorted(concerned)), since=alarm.now, failed=failed
        )
    if not concerned:
        return None
    asked = (roster.version, tuple(sorted(slow_ones(paces.values()).items())), cost_of(said, policy.change_cost))
    if memory.asked != asked:
        memory.asked, memory.remedies = asked, tuple(_remedies(situation, current, paces, concerned, said))
    chosen = choose((remedy.rung for remedy in memory.remedies), alarm.now - memory.since)
    if chosen is None:
        waits = min((one.rung.patience for one in memory.remedies if one.rung.pays), default=float("inf"))
        if waits != float("inf"):
            alarm.due(memory.since + waits)
        return None
    remedy = next(one for one in memory.remedies if one.rung is chosen)
    verdict = _verdict(situation, current, remedy, memory.remedies, concerned, said)
    if not chosen.acts:
        return _report(memory, verdict, view.token)
    if remedy.formed is None or not affordable(situation):
        return None
    formed = replace(
        remedy.formed,
        attempt=leader_state.next_attempt(),
        cause=Cause.BALANCE,
        detail=verdict.detail,
        tried_at=current.tried_at,
        spent=spent(situation),
        paces=tuple(
            replace(pace, uses=pace.uses + 1.0) if place in concerned else pace for place, pace in paces.items()
        ),
    )
    leader_state.proposed = alarm.now
    memory.proposed, memory.verdict = formed.key, verdict
    return forming.propose(view, formed)


def outdated(situation: Situation, formed: Generation) -> bool:
    """Return whether a proposed change for the sake of slow nodes has lost its reason: others are slow now."""
    return formed.cause is Cause.BALANCE and slow_ones(known(situation).values()) != slow_ones(formed.paces)


def sealed_for(situation: Situation, seal: acts.Seal) -> acts.Seal:
    """Return the seal of a change with what it was decided upon, where this leader proposed it."""
    memory = situation.leader_state.balance
    return replace(seal, verdict=memory.verdict) if memory.proposed == seal.generation.key else seal


def decided(done: WriteDone) -> tuple[acts.Concluded, ...]:
    """Return what to tell this leader's owner about slow nodes, or memory, now that a write of its own was made."""
    made = done.write if done.ok and isinstance(done.write, acts.Seal | acts.PutVerdict | acts.PutEnd) else None
    verdict = made.verdict if made is not None else None
    if verdict is None or verdict.kind not in (VerdictKind.SLOW, VerdictKind.MEMORY):
        return ()
    return (acts.Concluded(verdict=verdict, stalls={}),)


def gave_up(situation: Situation, formed: Generation) -> None:
    """Take note that a proposed change could not be made: the next one waits for twice as long."""
    if formed.cause is Cause.BALANCE:
        memory = situation.leader_state.balance
        memory.failed, memory.asked = memory.failed + 1, None


def _concerned(current: Generation, paces: dict[str, Pace]) -> tuple[str, ...]:
    """Return the machines for whose sake something may have to change: slow ones, or those that are well again."""
    slow = slow_places(paces, current.nodes)
    if slow:
        return tuple(slow)
    active = {node.place for node in current.nodes}
    return tuple(place for place in slow_ones(current.paces) if place in active)


def _remedies(
    situation: Situation,
    current: Generation,
    paces: dict[str, Pace],
    concerned: Sequence[str],
    said: SpeedReport,
) -> Iterator[Remedy]:
    """Yield what can be done, with what it gains and costs by the planner's word."""
    view, policy, planner = situation.view, situation.policy, situation.planner
    present = current.layout
    there = forming.crowd(situation, set(), condemned(situation))
    by_id = {p.node.id: p.node for p in there.candidates}
    if present is None or any(node.id not in by_id for node in current.nodes):
        return
    me = view.me
    ones, bound = (1.0,) * len(current.nodes), forming.bound_of(situation)

    def planned(nodes: Sequence[Node]) -> Plan | None:
        try:
            speeds = speeds_of(nodes, paces) or ones[: len(nodes)]
            plan = planner(len(nodes), me, present, speeds, bound, (len(nodes),))
        except LayoutError:
            return None
        if plan.seconds <= 0.0 or not plan.fits:
            return None
        return replace(plan, seconds=plan.seconds * delay_of(nodes, paces))

    now = planned(current.nodes)
    if now is None or now.kept <= 0.0:
        return
    # In seconds as they were measured: costs of machines may be unknown, or off.
    before = now.kept * delay_of(current.nodes, paces)
    scale = said.step_seconds / before if said.step_seconds else 1.0
    cost = cost_of(said, policy.change_cost)
    uses = max((paces[place].uses for place in concerned if place in paces), default=0.0)
    uses += situation.leader_state.balance.failed

    def rung(kind: RungKind, plan: Plan, *, acts: bool = policy.balance) -> Rung:
        return Rung(kind=kind, before=before * scale, after=plan.seconds * scale, cost=cost, uses=uses, acts=acts)

    def remedy(kind: RungKind, plan: Plan, nodes: tuple[Node, ...]) -> Remedy:
        formed = forming.formed_of(situation, there, nodes, plan, bound)
        return Remedy(rung=rung(kind, plan), formed=formed)

    best, order = now, current.nodes
    for nodes in _orders(current, present, paces):
        plan = planned(nodes)
        if plan is not None and plan.seconds < best.seconds - SAME * before:
            best, order = plan, nodes
    # The planner has chosen among both; a layout has one or the other.
    yield remedy(RungKind.SHARES if best.layout.shares else RungKind.RECUT, best, order)
    spares = [p.node for p in there.candidates if not view.active(p.node.id) and _fresh(p.node, paces)]
    slow = [node for node in current.nodes if node.place in slow_places(paces, current.nodes)]
    slow.sort(key=lambda node: -paces[node.place].rho)
    if slow and spares:
        instead = dict(zip((node.id for node in slow), spares, strict=False))
        nodes = tuple(instead.get(node.id, node) for node in current.nodes)
        plan = planned(nodes)
        if plan is not None:
            yield remedy(RungKind.SWAP, plan, nodes)
    rest = [node for node in current.nodes if node not in slow]
    if slow and policy.allowed(len(rest)) == len(rest) and rest:
        plan = planned(rest)
        if plan is not None:
            yield Remedy(rung=rung(RungKind.EVICT, plan, acts=False), formed=None)


def cost_of(said: SpeedReport, assumed: float) -> float:
    """Return what a change costs, in seconds: as was measured, or no more than the generation took to begin."""
    return max(said.change_seconds or min(assumed, said.start_seconds or assumed), CHEAPEST)


def _fresh(node: Node, paces: dict[str, Pace]) -> bool:
    """Return whether a spare may take a slow node's place."""
    return node.place not in paces or not paces[node.place].slow


def _orders(current: Generation, layout: Layout, paces: dict[str, Pace]) -> Iterator[tuple[Node, ...]]:
    """Yield other orders of the nodes: with the slow ones in one stage, in exchange for nodes of it.

    That is the stage which has most of them, the first, the last, or one of those between, which are alike.
    """
    nodes, slots = current.nodes, len(current.nodes[0].slots)
    slow = [at for at, node in enumerate(nodes) if node.place in paces and paces[node.place].slow]
    if not slow or layout.pp < 2 or len(nodes) > MANY:
        return
    width = layout.stage_ranks
    held = Counter(at * slots // width for at in slow)
    for stage in dict.fromkeys((held.most_common(1)[0][0], 0, layout.pp - 1, layout.pp // 2)):
        whole = [at for at in range(len(nodes)) if at * slots // width == stage == ((at + 1) * slots - 1) // width]
        free = [at for at in whole if at not in slow]
        come = [at for at in slow if at not in whole]
        if not free or not come:
            continue
        order = list(nodes)
        for one, other in zip(come, free, strict=False):
            order[one], order[other] = order[other], order[one]
        yield tuple(order)


def _verdict(
    situation: Situation,
    current: Generation,
    remedy: Remedy,
    remedies: Sequence[Remedy],
    concerned: Sequence[str],
    said: SpeedReport,
) -> Verdict:
    rung = remedy.rung
    slow = [node for node in current.nodes if node.id in said.slow]
    ranks = [
        rank
        for node in slow
        for first in [current.first_rank(node.name, node.incarnation) or 0]
        for rank in range(first, first + len(node.slots))
    ]
    who = ", ".join(
        f"{node.name} takes {said.slow[node.id].rho:.2f} times as long ({said.slow[node.id].kind})"
        for node in slow[:NAMED]
    )
    who = who or f"{', '.join(sorted(concerned)[:NAMED])} is well again"
    back = not slow
    return Verdict(
        kind=VerdictKind.SLOW,
        fault=str(rung.kind) if not back else "back",
        key=current.key,
        step=situation.roster.reports.step(),
        detail=f"{who}; {_what(rung.kind, back=back)}: steps of {rung.after:.3g} s instead of {rung.before:.3g} s",
        culprits=tuple(node.id for node in slow),
        ranks=tuple(ranks),
        act=rung.acts,
        before=rung.before,
        after=rung.after,
        rungs=tuple(_line(one.rung) for one in remedies),
    )


def _what(kind: RungKind, *, back: bool) -> str:
    if back:
        return "the layout for nodes that are alike"
    match kind:
        case RungKind.SWAP:
            return "a spare takes its place"
        case RungKind.RECUT:
            return "its stage gets less to compute"
        case RungKind.SHARES:
            return "it gets fewer micro-batches of each step"
        case RungKind.EVICT:
            return "the others would be faster without it"


def _line(rung: Rung) -> str:
    """Return a rung in words, for people."""
    if not rung.pays:
        share = f"{abs(rung.gain):.0%} {'more' if round(rung.gain, 2) < 0 else 'less'}"
        return f"{rung.kind}: steps of {rung.after:.3g} s, {share}: not worth a change"
    when = f"is made once that has lasted for {rung.patience:.0f} s" if rung.acts else "is left to you"
    return (
        f"{rung.kind}: steps of {rung.after:.3g} s, {rung.gain:.0%} less, at a price of {rung.price:.0f} s; it {when}"
    )


def _report(memory: Balance, verdict: Verdict, token: int) -> acts.PutVerdict | None:
    """Return the write of a finding upon which nothing is done, once for each generation and set of slow nodes."""
    if memory.reported:
        return None
    memory.reported = True
    return acts.PutVerdict(verdict=verdict, token=token)
