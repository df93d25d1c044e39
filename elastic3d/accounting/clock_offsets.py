"""By how much the wall clocks of a run's nodes differ, from what several of them wrote down of one moment.

All keepers hear of a generation's sealing from etcd at nearly the same time, and the snapshots of a step are held
everywhere at nearly the same time, too. The median of the differences is taken, because single ones may be late.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic3d.accounting.node_lives import NodeLife
from elastic3d.accounting.recorded_events import SECOND, RecordedEvent

LEAST = SECOND // 10
"""Differences below this are not told from the delays with which events are written: such clocks count as equal."""

ENOUGH = 500
"""Moments that are compared at most, from both ends of a run: a median needs no more."""

Moment = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a node's wall clock is ahead of the first node's."""

    node: str
    """The node."""
    ahead: int
    """Microseconds, negative where it is behind; 0 where the difference is too small to be told."""
    moments: int
    """From how many moments that is known; 0: from none, and the clocks count as equal."""


def clock_offsets(lives: Sequence[NodeLife]) -> tuple[ClockOffset, ...]:
    """Return how the clocks of all nodes differ from that of the node that shares most moments with others."""
    moments: dict[str, dict[Moment, int]] = {}
    for life in lives:
        mine = moments.setdefault(life.node, {})
        for event in life.events:
            moment = _moment(event)
            if moment is not None:
                mine.setdefault(moment, event.at)
    moments = {node: _few(mine) for node, mine in moments.items()}
    nodes = sorted(moments, key=lambda node: (-len(moments[node]), node))
    known: dict[str, ClockOffset] = {}
    waiting = nodes
    while waiting:
        if not known:
            known[nodes[0]] = ClockOffset(node=nodes[0], ahead=0, moments=len(moments[nodes[0]]))
        for node in waiting:
            if node not in known and (offset := _against(moments, node, known)) is not None:
                known[node] = offset
        left = [node for node in waiting if node not in known]
        if len(left) == len(waiting):
            break
        waiting = left
    return tuple(known.get(node, ClockOffset(node=node, ahead=0, moments=0)) for node in sorted(nodes))


def by_one_clock(lives: Sequence[NodeLife], offsets: Sequence[ClockOffset]) -> list[NodeLife]:
    """Return lives whose times are all by the same clock."""
    ahead: Mapping[str, int] = {offset.node: offset.ahead for offset in offsets}
    return [
        replace(life, events=tuple(replace(event, at=event.at - ahead[life.node]) for event in life.events))
        if ahead.get(life.node)
        else life
        for life in lives
    ]


def _moment(event: RecordedEvent) -> Moment | None:
    """Return what happens once and is written down by several nodes, as something to compare; None for all else."""
    members = {*event.names("nodes"), *event.names("spares")}
    match event.name:
        # A newcomer hears of the present generation, in which it is not, long after that was sealed.
        case "generation.sealed" if event.node in members:
            return event.name, event.whole("number"), event.names("nodes"), event.text("cause")
        case "generation.proposed" if event.node in members:
            return event.name, event.whole("number"), event.whole("attempt"), event.names("nodes")
        case "snapshot.held":
            return event.name, event.generation, event.whole("step")
        case _:
            return None


def _few(mine: dict[Moment, int]) -> dict[Moment, int]:
    if len(mine) <= 2 * ENOUGH:
        return mine
    items = sorted(mine.items(), key=lambda item: item[1])
    formed = [item for item in items if item[0][0] != "snapshot.held"]
    return dict([*items[:ENOUGH], *items[-ENOUGH:], *formed])


def _against(
    moments: Mapping[str, Mapping[Moment, int]], node: str, known: Mapping[str, ClockOffset]
) -> ClockOffset | None:
    """Return a node's offset by the first of those that are known with which it shares a moment; None if none does."""
    for other, offset in known.items():
        shared = moments[node].keys() & moments[other].keys()
        if shared:
            ahead = round(statistics.median(moments[node][one] - moments[other][one] for one in shared))
            return ClockOffset(
                node=node, ahead=offset.ahead + (ahead if abs(ahead) >= LEAST else 0), moments=len(shared)
            )
    return None
