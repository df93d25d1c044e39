"""Playing schedules by the thousand, drawn from seeds: the totals, and a minimised schedule of each failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Outcome(Protocol):
    """The outcome of one schedule."""

    @property
    def violations(self) -> list[str]:
        """The violated invariants."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts to be added up over many."""
        ...

    def report(self) -> str:
        """Return the schedule, as --replay or a test reads it, with its violations."""
        ...

    def document(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        ...


_O = TypeVar("_O", bound=Outcome)
_S = TypeVar("_S")


@dataclass(slots=True, kw_only=True)
class Tally(Generic[_O]):
    """The outcome of many schedules. counts: the sums of theirs."""

    schedules: int = 0
    seconds: float = 0.0
    failures: list[_O] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def per_minute(self) -> float:
        """Schedules a minute."""
        return 60 * self.schedules / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, object]:
        """Return the tally as JSON."""
        summary: dict[str, object] = {"schedules": self.schedules, "seconds": round(self.seconds, 3), **self.counts}
        return summary | {"failures": [outcome.document() for outcome in self.failures]}

    def __str__(self) -> str:
        counts = "".join(f"{number} {what}, " for what, number in self.counts.items())
        return (
            f"{self.schedules} schedules, {counts}{len(self.failures)} with violations; "
            f"{self.per_minute:.0f} schedules a minute"
        )


def play_many(
    play: Callable[[int], _O],
    smallest: Callable[[_O], _O],
    *,
    first: int,
    count: int,
    most: int = 3,
    played: Callable[[int], None] = lambda done: None,
) -> Tally[_O]:
    """Play the schedules of `count` seeds, from `first` on; stop after `most` failures, and minimise each.

    played: called after each with the number played so far.
    """
    began = time.perf_counter()
    tally: Tally[_O] = Tally()
    for seed in range(first, first + count):
        outcome = play(seed)
        tally.schedules += 1
        tally.counts.update(outcome.counts)
        if outcome.violations:
            tally.failures.append(smallest(outcome))
            if len(tally.failures) >= most:
                break
        played(tally.schedules)
    tally.seconds = time.perf_counter() - began
    return tally


def alike(outcome: Outcome, play: Callable[[_S], Outcome], kind: Callable[[str], str]) -> Callable[[_S], bool]:
    """Return whether another schedule has a violation of the same kind as this outcome's first."""
    wanted = kind(outcome.violations[0])
    return lambda schedule: any(kind(violation) == wanted for violation in play(schedule).violations)
