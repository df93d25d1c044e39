"""What a live job's leader keeps in etcd of where the time of its nodes went: enough for the next leader to go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic3d.accounting.past_steps import PastSlowness
from elastic3d.accounting.spans import Category

MOST = 1 << 62
"""Microseconds, 146 years of a thousand nodes, from which on a sum is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStretch:
    """Steps `first` to `last`, made one after the other, that all count. generation: that of the newest.

    by_category: node-microseconds that they took. Of a stretch that is lost in part, each step counts for the same.
    """

    generation: int
    first: int
    last: int
    by_category: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputRecord:
    """Node-microseconds by category, from the first time that somebody led the run. Those of one node are never twice.

    at: the leader's wall clock when it wrote this; since: when the account was begun, for people only. by_category: all
    until `at`, what is under way as far as it is known. by_cause: of these, what generations cost, by why they were
    formed. steps: those that count.

    The rest is for the next leader. number, step: the moment that `settled` is as of, which all nodes of generation
    `number` know by a clock of their own: its sealing, where `step` is -1, or the end of a step that was made in it.
    cause: why it was formed. active, spares, joining, leaving: nodes at that moment. stretches: the steps that a later
    generation may go back behind. recent: microseconds of the newest steps of the generation, or of the one before if
    it has made none. first: what counts as useful of its first step, until the second shows how much of it was; else
    -1. slowness: its slow ranks.
    """

    at: float = 0.0
    since: float = 0.0
    by_category: dict[str, int] = field(default_factory=dict)
    by_cause: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    number: int = 0
    step: int = -1
    cause: str = ""
    active: int = 0
    spares: int = 0
    joining: int = 0
    leaving: int = 0
    settled: dict[str, int] = field(default_factory=dict)
    stretches: tuple[StepStretch, ...] = ()
    recent: tuple[int, ...] = ()
    first: int = -1
    slowness: tuple[PastSlowness, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no leader writes, ValueError: a record is read by programs that others wrote, too."""
        tables: list[Mapping[str, int]] = [self.by_category, self.settled, *self.by_cause.values()]
        for table in [*tables, *(stretch.by_category for stretch in self.stretches)]:
            for name, spent in table.items():
                Category(name)
                if not 0 <= spent < MOST:
                    raise ValueError(f"{name} has {spent} microseconds")
        counts = (self.steps, self.number, self.active, self.spares, self.joining, self.leaving, *self.recent)
        if min(counts) < 0 or self.step < -1 or self.first < -1:
            raise ValueError(f"a number of nodes, steps or microseconds is negative: {min(*counts, self.step)}")
        for stretch in self.stretches:
            if not 0 < stretch.first <= stretch.last:
                raise ValueError(f"a stretch from step {stretch.first} to {stretch.last}")
        if not sum(self.settled.values()) <= sum(self.by_category.values()):
            raise ValueError("less time has passed than was settled")
