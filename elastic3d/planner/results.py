"""The results of planning: layouts in order, with their predicted time and memory, and why others do not work."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.values import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that works, as predicted.

    nodes: how many it uses; spares: how many it leaves. micro_batches: how many each pipeline runs in one step, fillers
    included. seconds: of one step. memory_bytes: on the fullest device. memory, time: their contributors, in bytes and
    seconds, which add up to the figures above.
    """

    layout: Layout
    nodes: int
    spares: int
    micro_batches: int
    seconds: float
    memory_bytes: int
    memory: dict[str, int] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedLayout:
    """A layout that does not work, and what would have to be different."""

    layout: Layout
    nodes: int
    reason: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Layouts that work, best first, and those that do not."""

    ranking: tuple[Candidate, ...]
    rejected: tuple[RejectedLayout, ...] = ()
