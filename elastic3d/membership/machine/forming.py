"""Form the next generation: which nodes could take part, how many of them, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from elastic3d.errors import LayoutError
from elastic3d.membership import actions as acts
from elastic3d.membership.machine.convictions import convicted
from elastic3d.membership.machine.generation_index import index_of
from elastic3d.membership.machine.paces import known, slow_places, speeds_of
from elastic3d.membership.machine.roster import Present
from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import GenerationHistory, MemberRecord, Proposal
from elastic3d.membership.topology import arrange
from elastic3d.planner import Plan
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Cause, Generation, Layout, Node

NAMED = 32
"""Most nodes that a history names of those that came or went; of the others it gives the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The members a generation can be formed of, in order of preference, and the others: warm, but not to be active."""

    candidates: tuple[Present, ...]
    others: tuple[Present, ...] = ()


def crowd(
    situation: Situation, without: set[str], places: set[str], *, draining: bool = False, apart: bool = False
) -> Crowd:
    """Return which members are there: those of the present generation first, its spares next, then others by arrival.

    The ids `without` are left out; members at `places` are kept out as if they were in quarantine. draining: active
    nodes that have to leave may go on if they must; apart: so may those that stand aside. An active node that has lost
    its lease is there until its time is over, or until two neighbours call it silent and none hears it: losing a lease
    is not being dead.
    """
    view, roster = situation.view, situation.roster
    # A tomb may be under way: what is decided now would be of a member that is out by then.
    without = {*without, *situation.leader_state.buried}
    fit: list[str] = []
    others: list[str] = []
    for id in roster.eligible:
        if id not in without:
            (others if places and roster.members[id].node.place in places else fit).append(id)
    last: list[str] = []
    for id in roster.unfit:
        if id in without or id in roster.refused or id in roster.replaced:
            continue
        if id not in roster.draining:
            (last if apart and id in roster.apart and not roster.kept_out(id) else others).append(id)
        elif view.active(id) and draining and not roster.kept_out(id):
            last.append(id)
    missing = {
        id: Present(record=MemberRecord(node=node), order=0)
        for id, node in _unsure(situation, without, places, [*roster.eligible, *last])
    }
    paces = known(situation)

    def preferred(id: str) -> tuple[bool, tuple[int, int]]:
        node = missing[id].node if id in missing else roster.members[id].node
        # A slow machine waits behind all others, unless it trains already: what to do then is weighed (`balance`).
        waits = node.place in paces and paces[node.place].slow and not view.active(id)
        return waits, roster.order(id)

    ids = [*sorted([*fit, *missing], key=preferred if paces else roster.order), *sorted(last, key=roster.order)]
    return Crowd(
        candidates=tuple(missing[id] if id in missing else roster.members[id] for id in ids),
        others=tuple(roster.members[id] for id in sorted(others, key=roster.order)),
    )


def _unsure(situation: Situation, without: set[str], places: set[str], known: list[str]) -> Iterator[tuple[str, Node]]:
    """Yield active nodes without a lease that may go on, besides those `known` to be able to."""
    view, roster = situation.view, situation.roster
    index = view.index
    if not any(view.active(id) for id in known):
        return
    accused = {other for id in roster.reports.accusing if id not in without for other in roster.reports[id].silent}
    for id in roster.missing:
        if index is None or id in without or id in roster.replaced:
            continue
        if id in accused:
            near = [n for n in view.ring.around(id, view.tombs) if n in roster.members and n not in without]
            hears = [id not in report.silent for report in map(roster.reports.get, near) if report is not None]
            # A single member may itself be the one that is cut off.
            if len(hears) >= 2 and not any(hears):
                continue
        node = index.nodes[id]
        if node.place not in places and node.place not in roster.quarantines and node.name not in roster.drains:
            yield id, node


def form(situation: Situation, there: Crowd, bound: MemoryBound | None = None) -> Generation:
    """Return the next generation of the members there, its cause to be filled in; LayoutError if none is legal.

    bound: what its ranks may need; None for what the present generation was formed for.
    """
    view = situation.view
    present = view.generation.layout if view.generation is not None else None
    bound = bound or bound_of(situation)
    chosen, plan = _fit(situation, there, present, bound)
    layout = plan.layout if plan is not None else None
    return formed_of(situation, there, arrange(view.generation, chosen, layout), plan, bound)


def suffice(situation: Situation, ids: Iterable[str]) -> bool:
    """Return whether a generation can be formed of these members alone: enough by the policy, and a layout fits.

    Planning takes part of a second, and may be asked for at every event: the leader remembers the answer.
    """
    current, sufficed = situation.view.generation, situation.leader_state.sufficed
    there = Crowd(candidates=tuple(situation.roster.members[id] for id in ids))
    # After one generation it is a matter of their number alone: where nodes are slow a layout is slow, too.
    count = len(there.candidates)
    if count not in sufficed:
        try:
            chosen, _ = _fit(situation, there, current.layout if current is not None else None, bound_of(situation))
        except LayoutError:
            chosen = []
        sufficed[count] = bool(chosen)
    return sufficed[count]


def bound_of(situation: Situation) -> MemoryBound | None:
    """Return what ranks may need by what the present generation's record knows, None for whatever they want."""
    return situation.view.generation.memory if situation.view.generation is not None else None


def formed_of(
    situation: Situation, there: Crowd, nodes: tuple[Node, ...], plan: Plan | None, bound: MemoryBound | None
) -> Generation:
    """Return the next generation of these nodes in this order, its cause to be filled in; all others are spares.

    plan: its layout, and what blocks compute again, planned below the bound if there is one.
    """
    view, me, roster = situation.view, situation.view.me, situation.view.roster
    active = {node.id for node in nodes}
    floor = max((p.record.floor for p in there.candidates), default=0)
    return Generation(
        number=max(view.generation.number if view.generation else 0, floor) + 1,
        cause=Cause.START,
        nodes=nodes,
        spares=tuple(p.node for p in (*there.candidates, *there.others) if p.node.id not in active),
        layout=plan.layout if plan is not None else None,
        leader=me.node.name,
        job=me.profile.job if me.profile else "",
        reached=max(
            view.generation.reached if view.generation else 0, roster.reports.safe() if roster is not None else 0
        ),
        distrusted=view.distrusted,
        rollbacks=view.rollbacks,
        convicted=convicted(situation),
        paces=tuple(known(situation).values()),
        memory=replace(bound, recompute=plan.recompute or "none") if plan is not None and bound is not None else None,
        writer=_writer(view.generation, nodes),
    )


def _writer(previous: Generation | None, nodes: tuple[Node, ...]) -> int:
    """Return which of `nodes` writes the run's curves: see `Generation`."""
    if previous is None or not previous.nodes:
        return 0
    before = index_of(previous).node_ranks
    stayed = [at for at, node in enumerate(nodes) if node.id in before]
    return next((at for at in stayed if before[nodes[at].id] == previous.writer), stayed[0] if stayed else 0)


def _fit(
    situation: Situation, there: Crowd, present: Layout | None, bound: MemoryBound | None
) -> tuple[list[Node], Plan | None]:
    """Return which of the candidates can be active, and their plan.

    How many is planned as if all were alike, wherever slow ones stand: going on with fewer nodes because some are slow
    is left to a person. Where not all are needed, slow ones are left out.
    """
    view, policy, planner, me = situation.view, situation.policy, situation.planner, situation.view.me
    count, paces = len(there.candidates), known(situation)
    used = policy.allowed(count)
    chosen = [p.node for p in there.candidates[:used]]
    if me.profile is None:
        return chosen, None
    if not used:
        raise LayoutError(_no_number(policy, count))
    try:
        plan = planner(used, me, present, (), bound, policy.numbers(used))
    except LayoutError:
        # Where nothing fits, whatever numbers are allowed, the planner says what would.
        planner(used, me, present, (), bound)
        raise LayoutError(_no_number(policy, count)) from None
    if paces and plan.nodes < used:
        slow = slow_places(paces, chosen)
        leaving = situation.roster.unfit
        chosen.sort(key=lambda node: (node.id in leaving, slow[node.place].rho if node.place in slow else 1.0))
    chosen = chosen[: plan.nodes]
    # In the order that the present layout gives them: another one moves newcomers only.
    speeds = speeds_of(arrange(view.generation, chosen, present), paces) if paces else ()
    return chosen, planner(len(chosen), me, present, speeds, bound, (len(chosen),)) if speeds else plan


def _no_number(policy: Policy, count: int) -> str:
    return f"no layout uses an allowed number of {count} node(s); {policy.counting()}: add nodes or allow other numbers"


def seal(view: View, generation: Generation) -> acts.Seal:
    """Return the write that seals it, with its history. The adapter fills in the history's time."""
    before = index_of(view.generation).nodes if view.generation is not None else {}
    after = index_of(generation)
    was = index_of(view.generation).node_ranks if view.generation is not None else {}
    joined = [after.nodes[id].name for id in after.ids if id not in was]
    left = [before[id].name for id in was if id not in after.node_ranks]
    history = GenerationHistory(
        number=generation.number,
        attempt=generation.attempt,
        cause=generation.cause,
        detail=generation.detail,
        leader=generation.leader,
        active=len(generation.nodes),
        spares=len(generation.spares),
        joined=_few(joined),
        left=_few(left),
        layout=str(generation.layout) if generation.layout is not None else "",
        at=0.0,
    )
    return acts.Seal(
        generation=generation,
        history=history,
        token=view.token,
        previous=view.generation_revision,
        base=view.standing,
    )


def propose(view: View, generation: Generation, *, switch: bool = False) -> acts.Propose:
    """Return the write that lets everybody prepare this generation, or leave for it."""
    proposal = Proposal(generation=generation, switch=switch)
    return acts.Propose(proposal=proposal, token=view.token, previous=view.generation_revision, base=view.standing)


def _few(names: list[str]) -> tuple[str, ...]:
    return tuple(names) if len(names) <= NAMED else (*names[:NAMED], f"and {len(names) - NAMED} more")
