"""Slices of one thread of a timeline: each lies wholly within another one or beside it, as viewers ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSlice:
    """Something that took from `start` to `stop`, in microseconds. arguments: what is shown of it besides."""

    start: int
    stop: int
    name: str
    category: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def nested(slices: Iterable[TraceSlice]) -> list[TraceSlice]:
    """Return slices in order, those around others before them, each cut where one that it begins in ends.

    Slices without any length are left out: of those that begin together, the longer one is around the other.
    """
    kept: list[TraceSlice] = []
    around: list[int] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.stop)):
        while around and around[-1] <= one.start:
            around.pop()
        stop = min([one.stop, *around[-1:]])
        if stop > one.start:
            kept.append(one if stop == one.stop else replace(one, stop=stop))
            around.append(stop)
    return kept


def in_lanes(slices: Iterable[TraceSlice]) -> list[list[TraceSlice]]:
    """Return slices in as few rows as have no two at one time: trainers of a generation start beside those before."""
    lanes: list[list[TraceSlice]] = []
    for one in sorted(slices, key=lambda one: (one.start, one.stop)):
        free = next((lane for lane in lanes if lane[-1].stop <= one.start), None)
        if free is None:
            lanes.append([one])
        else:
            free.append(one)
    return lanes
