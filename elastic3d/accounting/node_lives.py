"""A node's events, from a keeper's start to its end.

A node that was killed may come back and go on in the same file, and so may a run that was started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic3d.accounting.recorded_events import SECOND, RecordedEvent

SET_BACK = SECOND
"""A line that is so much earlier than the one before it was written after the clock had been set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """One life of a node: its events in order, never empty. start: which start of the run it belongs to, from 0.

    whole: it is known from its beginning; otherwise the events before are gone, as where a file was too large.
    set_back: by how many microseconds in all its clock was set back meanwhile; its times do not show that.
    """

    node: str
    events: tuple[RecordedEvent, ...]
    whole: bool = True
    set_back: int = 0
    start: int = 0

    @property
    def first(self) -> int:
        """Time of its first event."""
        return self.events[0].at

    @property
    def last(self) -> int:
        """Time of its last event."""
        return self.events[-1].at

    @property
    def ended(self) -> bool:
        """Whether its keeper ended by itself; otherwise it was killed, or runs still."""
        return any(event.name == "job.ended" for event in self.events)


def lives(node: str, events: Sequence[RecordedEvent]) -> list[NodeLife]:
    """Return the lives of one node. events: all of its own, in the order in which it wrote them."""
    parts: list[list[RecordedEvent]] = []
    joined = fenced = ended = False
    for event in events:
        again = event.name == "member.joined" and joined and not fenced
        if not parts or ended or event.name == "node.started" or again:
            parts.append([])
            joined = fenced = ended = False
        parts[-1].append(event)
        joined |= event.name == "member.joined"
        fenced = event.name == "member.fenced" or (fenced and event.name != "member.joined")
        ended = event.name == "job.ended"
    # Whatever a clock says, no life begins before the one before it has ended.
    result: list[NodeLife] = []
    for part in parts:
        steady, set_back = _steady(part)
        ordered = sorted(steady, key=lambda event: event.at)
        least = result[-1].last if result else 0
        ordered = [event if event.at >= least else replace(event, at=least) for event in ordered]
        whole = part[0].name in ("node.started", "member.joined", "admission.failed")
        result.append(NodeLife(node=node, events=tuple(ordered), whole=whole, set_back=set_back))
    return result


def _steady(events: Sequence[RecordedEvent]) -> tuple[list[RecordedEvent], int]:
    """Return events as a clock that nobody sets would have stamped them, and by how much this one was set back.

    Lines of several threads may be some milliseconds out of order. A clock that was set forward cannot be told from
    one that ran while nothing was written.
    """
    result: list[RecordedEvent] = []
    set_back = reached = 0
    for event in events:
        if result and event.at + set_back < reached - SET_BACK:
            set_back = reached - event.at
        at = event.at + set_back
        reached = max(reached, at)
        result.append(event if at == event.at else replace(event, at=at))
    return result, set_back


def in_starts(all_lives: Sequence[NodeLife]) -> list[NodeLife]:
    """Return the same lives, each with the number of the run's start that it belongs to.

    A run that was started again, after its records in etcd were gone, counts its generations from 1 again.
    """
    again: list[NodeLife] = []
    newest: dict[str, tuple[int, frozenset[int]]] = {}
    for life in sorted(all_lives, key=lambda life: life.first):
        numbers = _sealed(life)
        made = frozenset(event.generation for event in life.events if event.name == "trainer.started")
        if not numbers:
            continue
        last, before = newest.get(life.node, (0, frozenset()))
        if numbers[0] < last or numbers[0] in made & before:
            again.append(life)
            before = frozenset()
        newest[life.node] = numbers[-1], before | made
    # The same start shows on several nodes: a new one begins where a node has its second.
    begins: list[int] = []
    members: set[str] = set()
    for life in again:
        if not begins or life.node in members:
            begins.append(life.first)
            members = set()
        members.add(life.node)
    return [replace(life, start=_start_of(life, begins)) for life in all_lives]


def _start_of(life: NodeLife, begins: Sequence[int]) -> int:
    sealed = next((event.at for event in life.events if event.name == "generation.sealed"), life.last)
    return sum(begin <= sealed for begin in begins)


def _sealed(life: NodeLife) -> list[int]:
    numbers = (event.whole("number") for event in life.events if event.name == "generation.sealed")
    return [number for number in numbers if number]
