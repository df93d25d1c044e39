"""The order of a mixture: which sample of which source is at each position of a run.

A step of B samples, in which the sources have shares B * w summing to B, is a circle of circumference B on which the
sources lie one after the other; B points at distance 1 are put on it, and each source gets as many samples as there are
points in its part: its share rounded down or up (systematic sampling; Madow, "On the theory of systematic sampling",
1949). With every step the points turn by the golden section of the smallest period, so that who is rounded up changes:
where weights stay, the totals are exactly the shares after each period of D steps, D being the common denominator of
the shares. The turn of step t is linear in t, and so are the shares between two stages, so that sums over steps are
sums of rounded linear functions, which have a closed form.

Each source is consumed in order of its own epochs and permutations: its g-th sample in the run is at place g mod n of
epoch g // n. All is a function of (proportions, global batches, seed, step): a step's counts take O(sources), what was
consumed before a step O(stages + sources * log D) operations. Only what lies before a step counts for it.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from elastic3d.data.apportionment import floor_sum, golden_step
from elastic3d.data.permutation import Indices, KeyedPermutation, key
from elastic3d.data.proportions import Proportions
from elastic3d.data.sizes import Parts, part_at, position_at, step_at

Counts = tuple[int, ...]
"""Samples of each source."""

HORIZONS = tuple(4**n for n in range(2, 8))
"""Steps after which the drift of a turn is looked at, whatever comes of them, since later stages may change."""

MULTIPLES = range(1, 64, 2)
"""Of the golden section: the turns that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSteps:
    """Steps from `first` on, in which all shares are linear functions of the step.

    After i of these steps source k ends, on the circle, at (ends[k] + slopes[k] * i) / divisor samples, and the points
    have turned by (turn * i + start) / divisor. before: samples of each source in all steps before.
    """

    first: int
    batch: int
    divisor: int
    ends: tuple[int, ...]
    slopes: tuple[int, ...]
    turn: int
    start: int
    before: Counts

    def counts(self, step: int) -> Counts:
        """Return the samples of each source in a step."""
        i, divisor = step - self.first, self.divisor
        turned = self.turn * i + self.start
        reached = [(end + slope * i + turned) // divisor for end, slope in zip(self.ends, self.slopes, strict=True)]
        return _differences(turned // divisor, reached)

    def until(self, step: int) -> Counts:
        """Return the samples of each source in all steps of the run before `step`."""
        count = step - self.first
        base = floor_sum(count, self.divisor, self.turn, self.start)
        reached = [
            floor_sum(count, self.divisor, self.turn + slope, self.start + end)
            for end, slope in zip(self.ends, self.slopes, strict=True)
        ]
        return tuple(old + new for old, new in zip(self.before, _differences(base, reached), strict=True))


@functools.lru_cache(maxsize=16)
def stretches(proportions: Proportions, parts: Parts, seed: int) -> tuple[LinearSteps, ...]:
    """Return the steps of a run with these global batches as stretches, in order."""
    made: list[LinearSteps] = []
    nothing = (0,) * len(proportions.sources)
    for first in sorted({stage.step for stage in proportions.stages} | {step for step, _ in parts}):
        batch = part_at(parts, first)[1]
        # Two points determine a line; a line that ends in a later stage is never followed beyond it.
        here = list(accumulate(proportions.at(first)))
        after = list(accumulate(proportions.at(first + 1))) if _slopes_at(proportions, first) else here
        least = lcm(*(end.denominator for end in here + after))
        ends = [int(batch * least * end) for end in here]
        slopes = [int(batch * least * (new - old)) for old, new in zip(here, after, strict=True)]
        common = gcd(least, *ends, *slopes)
        divisor = least // common
        ends, slopes = [end // common for end in ends], [slope // common for slope in slopes]
        start = int(key("mixture", seed)) % divisor
        made.append(
            LinearSteps(
                first=first,
                batch=batch,
                divisor=divisor,
                ends=tuple(ends),
                slopes=tuple(slopes),
                turn=_turn(divisor, ends, slopes, start),
                start=start,
                before=made[-1].until(first) if made else nothing,
            )
        )
    return tuple(made)


def _slopes_at(proportions: Proportions, step: int) -> bool:
    return proportions.linear and step < proportions.stages[-1].step


def _turn(divisor: int, ends: list[int], slopes: list[int], start: int) -> int:
    """Return by how much the points turn in each step: of some candidates, the one with the least drift.

    A turn that goes along with a slope would round the same source up in many steps in a row.
    """
    golden = golden_step(divisor)
    if not any(slopes):
        return golden

    def drift(turn: int) -> int:
        most = 0
        for count in HORIZONS:
            base = floor_sum(count, divisor, turn, start)
            for end, slope in zip(ends, slopes, strict=True):
                share = end * count + slope * (count * (count - 1) // 2)
                given = floor_sum(count, divisor, turn + slope, start + end) - base
                most = max(most, abs(divisor * given - share))
        return most

    return min((golden * multiple % divisor for multiple in MULTIPLES), key=drift)


def _differences(first: int, reached: list[int]) -> Counts:
    return tuple(new - old for old, new in zip([first, *reached], reached, strict=False))


def _stretch(made: tuple[LinearSteps, ...], step: int) -> LinearSteps:
    return made[bisect_right(made, step, key=lambda stretch: stretch.first) - 1]


def counts(proportions: Proportions, parts: Parts, seed: int, step: int) -> Counts:
    """Return how many samples of each source a step consumes."""
    return _stretch(stretches(proportions, parts, seed), step).counts(step)


def consumed(proportions: Proportions, parts: Parts, seed: int, step: int) -> Counts:
    """Return how many samples of each source all steps before `step` consume."""
    return _stretch(stretches(proportions, parts, seed), step).until(step)


def samples(proportions: Proportions, parts: Parts, seed: int, first: int, stop: int) -> Indices:
    """Return the sample numbers at positions [first, stop) of the run, numbered one source after the other."""
    if first >= stop:
        return np.empty(0, dtype=np.uint64)
    made = stretches(proportions, parts, seed)
    begin, end = step_at(parts, first), step_at(parts, stop - 1) + 1
    steps = [_sources(_stretch(made, step), step, seed) for step in range(begin, end)]
    numbers = np.concatenate(steps)
    offset = first - position_at(parts, begin)
    inside = np.zeros(numbers.size, dtype=bool)
    inside[offset : offset + stop - first] = True
    chosen = np.empty(numbers.size, dtype=np.uint64)
    start = 0
    for number, (source, before) in enumerate(
        zip(proportions.sources, _stretch(made, begin).until(begin), strict=True)
    ):
        own = numbers == number
        ordinals = before + np.cumsum(own)[own & inside].astype(np.uint64) - np.uint64(1)
        chosen[own & inside] = np.uint64(start) + _permuted(ordinals, source.length, seed, number)
        start += source.length
    return chosen[inside]


def _sources(stretch: LinearSteps, step: int, seed: int) -> NDArray[np.intp]:
    """Return the source of each position of a step: all of them spread over its micro-batches."""
    each = np.repeat(np.arange(len(stretch.ends)), stretch.counts(step))
    batch = stretch.batch
    turn = int(key("mixture", seed, step)) % batch
    return each[(np.arange(batch) * golden_step(batch) + turn) % batch]


def _permuted(ordinals: Indices, length: int, seed: int, number: int) -> Indices:
    """Return the samples of a source by how many of it come before each in the run."""
    own = int(key("source", seed, number))
    epochs = ordinals // np.uint64(length)
    chosen = np.empty_like(ordinals)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        chosen[inside] = KeyedPermutation(length, own, int(epoch)).of(ordinals[inside] % np.uint64(length))
    return chosen
