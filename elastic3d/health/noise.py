"""What a median of few noisy values may be by chance. Pure.

How noisy values are is itself known from these few only. Three of them are close to each other now and then, so that
their median exceeds five of its own standard errors in one of ninety cases, though nothing but noise is in them: nodes
were found to be slow for it. Student's t is the multiple that belongs to how much is known: with `freedom` degrees of
freedom a mean exceeds t(chance, freedom) of its standard errors with that chance, however large the noise is.

Medians and mean absolute deviations are used here, since one long step must not count much. They exceed it more seldom:
where t has a chance of 1e-5, it was 0.7e-6 to 2.7e-6 for 2 to 63 degrees of freedom, in 3 million draws of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much values differ. deviations: from their median, added up; freedom: degrees of freedom these have."""

    deviations: float = 0.0
    freedom: float = 0.0

    def __add__(self, other: Noise) -> Noise:
        return Noise(deviations=self.deviations + other.deviations, freedom=self.freedom + other.freedom)

    def limited(self, freedom: float) -> Noise:
        """Return the same noise, as if no more than so much were known of it."""
        share = min(1.0, freedom / self.freedom) if self.freedom else 0.0
        return Noise(deviations=share * self.deviations, freedom=share * self.freedom)

    @property
    def deviation(self) -> float:
        """Return the standard deviation, of values that are normal."""
        return math.sqrt(math.pi / 2) * self.deviations / self.freedom if self.freedom else math.inf


def spread(values: Sequence[float], last: int) -> Noise:
    """Return how values differ where the `last` ones may be about another value than those before."""
    parts = [part for part in (values[:-last], values[-last:]) if part]
    return Noise(
        deviations=sum(abs(one - median(part)) for part in parts for one in part),
        freedom=sum(len(part) - 1 for part in parts),
    )


def standard_error(deviation: float, count: int) -> float:
    """Return that of a median of so many values, which is 1.25 / sqrt(count) of their deviation if they are many."""
    return deviation * math.sqrt(math.pi / (2 * count + math.pi - 2))


def student(chance: float, freedom: float) -> float:
    """Return what Student's t exceeds with this chance, to a few percent or too much.

    By Wallace's approximation (Annals of Mathematical Statistics 30, 1959), solved for t.
    """
    if freedom < 1:
        return math.inf
    normal = -NormalDist().inv_cdf(chance)
    return math.sqrt(freedom * math.expm1((normal * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom))
