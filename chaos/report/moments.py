"""The moments of a run that a picture of it shows: verdicts, what was noticed, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from chaos.history.claims import ACCUSING
from chaos.history.follow import ORDERLY_EXITS, Event

_TOGETHER = 5.0
"""Seconds within which several nodes may say one and the same."""


class MomentKind(StrEnum):
    """How a moment is shown."""

    VERDICT = "verdict"
    NOTICE = "notice"
    CHECKPOINT = "checkpoint"


VERDICTS = (
    *ACCUSING,
    "training.stalled",
    "audit.inconclusive",
    "memory.short",
    "layout.rebalanced",
    "batch.excluded",
    "run.rolled_back",
    "state.distrusted",
    "node.well",
)
"""Events that say what is wrong, or what was done about it."""

NOTICES = (
    "peer.lost",
    "peer.unreachable",
    "peer.reachable",
    "member.joined",
    "member.fenced",
    "node.draining",
    "notice.heard",
    "slot.failed",
    "trainer.exited",
    "trainer.unkillable",
    "etcd.lost",
    "etcd.back",
    "etcd.rolled_back",
    "store.waiting",
    "checkpoint.failed",
    "checkpoint.mended",
    "checkpoint.damaged",
    "copy.damaged",
    "snapshot.altered",
    "thread.failed",
)
"""Events that say what happened to a node or to what the job needs."""

_OF_ALL = ("etcd.lost", "etcd.back", "etcd.rolled_back", "store.waiting", "checkpoint.failed", "checkpoint.mended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event, and others like it at about the same time. at: of the first one. nodes: that it is about, if any.

    by: the nodes that said so.
    """

    kind: MomentKind
    name: str
    at: float
    nodes: tuple[str, ...] = ()
    by: tuple[str, ...] = ()
    detail: str = ""


def moments(events: Sequence[Event]) -> tuple[Moment, ...]:
    """Return the moments of `events`, which are in order; what several nodes say of the same is one."""
    shown: list[Moment] = []
    last: dict[tuple[str, tuple[str, ...]], int] = {}
    for event in events:
        moment = _moment(event)
        if moment is None:
            continue
        place = last.get((moment.name, moment.nodes))
        if place is None or moment.kind is MomentKind.CHECKPOINT or moment.at - shown[place].at >= _TOGETHER:
            last[moment.name, moment.nodes] = len(shown)
            shown.append(moment)
        else:
            shown[place] = replace(shown[place], by=tuple(dict.fromkeys((*shown[place].by, *moment.by))))
    return tuple(shown)


def _moment(event: Event) -> Moment | None:
    fields, name = event.fields, event.name
    detail = str(fields.get("detail") or fields.get("error") or fields.get("evidence") or "")
    nodes: tuple[str, ...] = (event.node,)
    kind = MomentKind.NOTICE
    if name == "checkpoint.committed":
        kind, nodes, detail = MomentKind.CHECKPOINT, (), f"step {fields.get('step')}"
    elif name in VERDICTS:
        kind, nodes = MomentKind.VERDICT, tuple(map(str, fields.get("nodes") or ()))
        what = str(fields.get("fault") or fields.get("finding") or fields.get("kind") or fields.get("remedy") or "")
        detail = f"{what}: {detail}" if what and detail else what or detail
    elif name not in NOTICES or (name == "trainer.exited" and fields.get("kind") in ORDERLY_EXITS):
        return None
    elif name in ("peer.lost", "peer.unreachable", "peer.reachable"):
        nodes = (str(fields.get("peer")),)
    elif name in _OF_ALL:
        nodes = ()
    elif name == "trainer.exited":
        detail = f"{fields.get('kind')}: {detail}" if detail else str(fields.get("kind"))
    return Moment(kind=kind, name=name, at=event.at, nodes=nodes, by=(event.node,), detail=detail)
