"""The nodes of a trace, each with its time: the same for all policies.

A trace says how many nodes are held and not which. Those that leave are drawn from a seed among those that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from chaos.simulation.trace import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One node, held from `at` until `until`, infinite for one that is held at the end of the trace.

    announced: it is notified before it is taken away.
    """

    host: int
    at: float
    until: float
    announced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """All nodes of a trace that ends at `end`, in the order in which they come."""

    lives: tuple[Life, ...]
    end: float

    def changes(self) -> list[tuple[float, int, Life]]:
        """Return when nodes leave (-1) and come (1), in order of time; at one time those that leave first."""
        both = [(life.until, -1, life) for life in self.lives if life.until < self.end]
        both += [(life.at, 1, life) for life in self.lives]
        return sorted(both, key=lambda change: (change[0], change[1], change[2].host))

    def counts(self) -> list[tuple[float, float, int]]:
        """Return spans of time and how many nodes are held in each, from 0 to the end."""
        spans: list[tuple[float, float, int]] = []
        since, held = 0.0, 0
        for at, by, _ in self.changes():
            if at > since:
                spans.append((since, at, held))
                since = at
            held += by
        if self.end > since:
            spans.append((since, self.end, held))
        return spans

    @property
    def most(self) -> int:
        """The most nodes held at one time."""
        return max((held for _, _, held in self.counts()), default=0)


def crowd(trace: Sequence[Held], end: float, *, seed: int, announced: float = 0.0) -> Crowd:
    """Return the nodes of a trace up to `end` seconds. announced: share of losses that are."""
    random = Random(f"lives {seed}")
    there: list[tuple[int, float]] = []
    lives: list[Life] = []
    newest = 0
    for change in trace:
        if change.at >= end:
            break
        while len(there) > change.nodes:
            host, at = there.pop(random.randrange(len(there)))
            lives.append(Life(host=host, at=at, until=change.at, announced=random.random() < announced))
        while len(there) < change.nodes:
            newest += 1
            there.append((newest, change.at))
    lives += [Life(host=host, at=at, until=math.inf) for host, at in there]
    return Crowd(lives=tuple(sorted(lives, key=lambda life: life.host)), end=end)


def mean_between(times: Iterable[float], held: float) -> float:
    """Return the mean seconds between interruptions at these times, of `held` seconds; infinite without any."""
    count = len(set(times))
    return held / count if count else math.inf
