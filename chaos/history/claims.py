"""What a job says of its nodes, and who commits its checkpoints: claims that a judge compares with what was done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chaos.history.follow import Event

ACCUSING = (
    "rank.stuck",
    "node.slow",
    "audit.failed",
    "step.redone",
    "node.lying",
    "exam.failed",
    "state.altered",
    "vote.split",
    "update.wrong",
)
"""Events that name the nodes at fault. Where they name several, one of them is."""
ENDING = 5.0
"""Seconds before a node says that its job has ended in which others may already miss it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation:
    """An event that names nodes as being at fault. at: seconds by the wall clock. detail: why, for people."""

    event: str
    at: float
    nodes: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A node that another one took for dead. event: what says so. by: the node that wrote it. detail: why."""

    node: str
    event: str
    at: float
    by: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint that `node` committed.

    generation: the newest one that was sealed by then, 0 before the first. rollbacks: how often nodes had said by then
    that etcd came back empty or from a backup.
    """

    node: str
    step: int
    at: float
    generation: int
    rollbacks: int = 0


def accusations(events: Sequence[Event]) -> tuple[Accusation, ...]:
    """Return who was named by `events`, which are in order; what names nobody is none."""
    return tuple(
        Accusation(
            event=event.name,
            at=event.at,
            nodes=tuple(map(str, event.fields["nodes"])),
            detail=str(event.fields.get("detail") or ""),
        )
        for event in events
        if event.name in ACCUSING and event.fields.get("nodes")
    )


def losses(events: Sequence[Event]) -> tuple[Loss, ...]:
    """Return which nodes were taken for dead in `events`, which are in order.

    By `peer.lost`, or by a generation without them that was sealed for a death. A node whose job ends is not lost.
    """
    lost: list[Loss] = []
    ended: dict[str, float] = {}
    members: dict[int, set[str]] = {}
    for event in events:
        if event.name == "job.ended":
            ended.setdefault(event.node, event.at - ENDING)
        elif event.name == "peer.lost":
            peer, evidence = str(event.fields["peer"]), str(event.fields["evidence"])
            lost.append(Loss(node=peer, event=event.name, at=event.at, by=event.node, detail=evidence))
        elif event.name == "generation.sealed" and int(event.fields["number"]) not in members:
            number, detail = int(event.fields["number"]), str(event.fields.get("detail") or "")
            members[number] = {*event.fields["nodes"], *(event.fields.get("spares") or ())}
            if event.fields["cause"] == "death":
                gone = members.get(number - 1, set()) - members[number]
                lost += [
                    Loss(node=n, event=event.name, at=event.at, by=event.node, detail=detail) for n in sorted(gone)
                ]
    return tuple(one for one in lost if one.at < ended.get(one.node, math.inf))


def commits(events: Sequence[Event], *, generation: int = 0, rollbacks: int = 0) -> tuple[Commit, ...]:
    """Return which checkpoints were committed by whom in `events`, which are in order.

    Whoever found one committed has not done it: two leaders may follow each other while ranks still write. generation,
    rollbacks: before these events.
    """
    made = []
    for event in events:
        if event.name == "generation.sealed":
            generation = max(generation, int(event.fields["number"]))
        elif event.name == "etcd.rolled_back":
            rollbacks += 1
        elif event.name == "checkpoint.committed" and event.fields["moved"]:
            step = int(event.fields["step"])
            made.append(Commit(node=event.node, step=step, at=event.at, generation=generation, rollbacks=rollbacks))
    return tuple(made)


def deposed(made: Sequence[Commit]) -> tuple[Commit, ...]:
    """Return the commits of a node that had been followed by another one within the same generation.

    The first ones of a generation may be those of the last leader, told late. One change of leaders in a generation is
    no fault either: a lease may run out. Who leads again after that would have been elected twice, unless etcd has
    lost the second election: a backup from before it names the former leader.
    """
    wrong: list[Commit] = []
    former = ""
    for number in sorted({one.generation for one in made}):
        own = [one for one in made if one.generation == number]
        late = 0
        while late < len(own) and own[late].node == former:
            late += 1
        # Without anybody else it is the leader, and none of its commits was late.
        led = own[late:] or own
        before: list[str] = []
        rollbacks = led[0].rollbacks
        for one in led:
            if one.rollbacks > rollbacks:
                before, rollbacks = [], one.rollbacks
            if one.node in before[:-1]:
                wrong.append(one)
            elif one.node not in before:
                before.append(one.node)
        former = led[-1].node
    return tuple(wrong)
