"""Time cut into spans that have a category each.

Spans of one node follow each other without a gap and without an overlap. They are painted in layers, a later one over
those before it, so that whatever the events say, every microsecond is in exactly one category.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Category(StrEnum):
    """What a node's time went to. Those that `elastic3d simulate goodput` has, too, mean the same there."""

    USEFUL = "useful"
    """Steps that count, and what the script does between them."""
    REPEATED = "repeated"
    """Steps that were made and lost, or were cut short."""
    NOTICING = "noticing"
    """From the last sign of life of what failed until somebody knew."""
    FORMING = "forming"
    """Agreeing on the next generation, sealing it, and waiting for its other nodes."""
    PREPARING = "preparing"
    """Trainers start: the process, the model, its groups, and what the first step takes beyond others."""
    RESTORING = "restoring"
    """Deciding from which state to go on, and reading it."""
    DATA = "data"
    """Waiting for samples."""
    SAVING = "saving"
    """What snapshots hold training up, and from the last step to the end: the last checkpoint."""
    SLOW = "slow"
    """Waiting for ranks that are slow or stand still."""
    JOINING = "joining"
    """A new node's start, until it is taken in."""
    SPARE = "spare"
    """Ready, and without a rank in the generation."""
    LEAVING = "leaving"
    """No longer in the generation, and not yet gone."""
    WAITING = "waiting"
    """Fewer nodes are there than the job may train with."""
    AWAY = "away"
    """Between the end of a node and its next start: not held, and part of no share."""
    UNKNOWN = "unknown"
    """No event says."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time from `start` to `stop`, in microseconds. cause: index of the past generation that it was spent for, or -1.

    For whose sake: steps that a new generation made again belong to it, and so does all that came before its first
    step.
    """

    start: int
    stop: int
    category: Category
    cause: int = -1

    @property
    def length(self) -> int:
        """Microseconds."""
        return self.stop - self.start


def paint(below: Sequence[Span], above: Iterable[Span]) -> list[Span]:
    """Return `below` where no span of `above` lies, and those elsewhere, as far as `below` reaches.

    below: in order, without overlaps. above: in any order; where two of them overlap, the one that begins later counts.
    """
    covering = _apart(above)
    if not covering:
        return list(below)
    result: list[Span] = []
    place = 0
    for span in below:
        at = span.start
        while place < len(covering) and covering[place].stop <= at:
            place += 1
        ahead = place
        while ahead < len(covering) and covering[ahead].start < span.stop:
            over = covering[ahead]
            start, stop = max(at, over.start), min(span.stop, over.stop)
            _add(result, at, start, span)
            _add(result, start, stop, over)
            at = stop
            ahead += 1
        _add(result, at, span.stop, span)
    return result


def _add(spans: list[Span], start: int, stop: int, like: Span) -> None:
    if stop <= start:
        return
    last = spans[-1] if spans else None
    if last is not None and last.stop == start and (last.category, last.cause) == (like.category, like.cause):
        spans[-1] = Span(last.start, stop, like.category, like.cause)
    else:
        spans.append(Span(start, stop, like.category, like.cause))


def _apart(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order and without overlaps: one that begins later hides those before it while it lasts."""
    ordered = sorted((span for span in spans if span.stop > span.start), key=lambda span: span.start)
    apart: list[Span] = []
    open_ones: list[Span] = []
    for number, span in enumerate(ordered):
        at, until = span.start, ordered[number + 1].start if number + 1 < len(ordered) else None
        open_ones.append(span)
        while open_ones and (until is None or at < until):
            top = open_ones[-1]
            stop = top.stop if until is None else min(top.stop, until)
            if stop > at:
                apart.append(Span(at, stop, top.category, top.cause))
                at = stop
            if top.stop <= at:
                open_ones.pop()
    return apart


def within(spans: Iterable[Span], start: int, stop: int) -> list[Span]:
    """Return the parts of spans that lie between two times."""
    return [
        Span(max(span.start, start), min(span.stop, stop), span.category, span.cause)
        for span in spans
        if span.stop > start and span.start < stop
    ]
