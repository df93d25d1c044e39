"""Ranks that stand still, as their nodes report them, and the simplest judge of them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from elastic3d.membership.stalls import RankStall, RankState, Stall, Verdict, VerdictKind, Wait
from elastic3d.values import Generation, Node

DEADLINE = 3.0
"""Seconds for which a rank that computes nothing may be silent."""

GATHER = 0.5
"""Seconds that the judge waits for more."""


class At(StrEnum):
    """What a node's ranks are at while nothing moves."""

    FAULT = "fault"  # stopped, in the middle of a step
    ODD = "odd"  # the script left the program that all ranks follow
    WAIT = "wait"  # in a collective, for others
    DATA = "data"  # each for its own data


def stall(generation: Generation, node: Node, at: At, *, step: int = 0, silent: float = DEADLINE) -> Stall:
    """Return what a node says of its ranks, all of which are at the same; `silent` in seconds."""
    first = generation.first_rank(node.name, node.incarnation)
    assert first is not None
    ranks = tuple(
        RankStall(
            rank=first + slot,
            step=step,
            made=step,
            phase="DATA" if at is At.DATA else "FORWARD",
            silent=int(silent * 1000),
            allowed_idle=int(DEADLINE * 1000),
            allowed_busy=30_000,
            beat=0,
            state=RankState.STOPPED if at is At.FAULT else RankState.IDLE,
            wait=Wait(axis="WORLD", number=7) if at in (At.WAIT, At.ODD) else None,
            odd="a collective is missing" if at is At.ODD else "",
        )
        for slot in range(len(node.slots))
    )
    return Stall(incarnation=node.incarnation, key=generation.key, ranks=ranks)


def judge(generation: Generation, stalls: Mapping[str, Stall], seconds: float) -> Verdict | None:
    """Say who is stopped or odd, or that all wait for data, once every node has spoken."""
    if len(stalls) < len(generation.nodes) or seconds < GATHER:
        return None
    ranks = {rank.rank: (id, rank) for id, stall in stalls.items() for rank in stall.ranks}
    odd = {number: id for number, (id, rank) in ranks.items() if rank.odd}
    at_fault = odd or {number: id for number, (id, rank) in ranks.items() if rank.state is RankState.STOPPED}
    if not at_fault and not all(rank.phase == "DATA" for _, rank in ranks.values()):
        return None
    fault = "left the program" if odd else "stopped" if at_fault else "data"
    names = dict.fromkeys(id.partition("@")[0] for id in at_fault.values())
    return Verdict(
        kind=VerdictKind.STUCK,
        fault=fault,
        key=generation.key,
        step=max(rank.step for _, rank in ranks.values()),
        detail=f"all wait for {', '.join(names)} ({fault})" if at_fault else "every rank waits for its data",
        culprits=tuple(dict.fromkeys(at_fault.values())),
        ranks=tuple(sorted(at_fault)),
        program=bool(odd),
        act=bool(at_fault),
    )
