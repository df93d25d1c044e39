"""Positions of a run that are excluded from training: half-open ranges, in order and apart from each other.

A hole is never consumed, and no other sample takes its place: what comes after it keeps its position and its step.
Whatever shifted would change every later step, and with it all that other layouts, or a run that knew the hole from its
beginning, compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from elastic3d.errors import UsageError

Holes = tuple[tuple[int, int], ...]


def joined(ranges: Iterable[tuple[int, int]]) -> Holes:
    """Return ranges in order, those that touch or overlap as one, and none that is empty."""
    made: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if first >= stop:
            continue
        if made and first <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        else:
            made.append((first, stop))
    return tuple(made)


def inside(holes: Holes, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of holes that lie in [first, stop)."""
    for begin, end in holes:
        part = max(begin, first), min(end, stop)
        if part[0] < part[1]:
            yield part


def between(holes: Holes, first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of [first, stop) that lie in no hole."""
    at = first
    for begin, end in inside(holes, first, stop):
        if at < begin:
            yield at, begin
        at = end
    if at < stop:
        yield at, stop


def length(ranges: Iterable[tuple[int, int]]) -> int:
    """Return how many positions ranges have that are apart from each other."""
    return sum(stop - first for first, stop in ranges)


def given(ranges: Any) -> Holes:
    """Return the holes that a script asks for; UsageError for anything but pairs (first, stop) of positions."""
    try:
        pairs = [(first, stop) for first, stop in ranges]
    except (TypeError, ValueError):
        pairs = [(ranges, None)]
    for pair in pairs:
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in pair)
        if not whole or not 0 <= pair[0] < pair[1]:
            raise UsageError(
                "run.batches: exclude takes pairs (first, stop) of positions, as the event batch.excluded lists them; "
                f"{pair!r} is none"
            )
    return joined(pairs)
