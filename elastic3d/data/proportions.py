"""What share of each step every source of a mixture has: a frozen value, since it is part of a run's identity."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from elastic3d.errors import UsageError

FINEST = 10**6
"""A weight is read as the nearest fraction with a denominator up to this."""

UNITS = 10**12
"""Weights without a common denominator up to this are rounded to parts of it."""

TOLERANCE = 1e-6
"""How far the weights of a step may be from one in sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource:
    """A data set in a mixture. length: its samples. fingerprint: of its contents, "" if it has none."""

    name: str
    length: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStage:
    """From `step` on, source i has weights[i] of every sum(weights) samples."""

    step: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportions:
    """The sources of a mixture, whose samples are numbered one source after the other, and their weights by step.

    stages: in order of steps, the first from step 0. linear: whether weights go in a straight line from each stage to
    the next, instead of staying until it begins.
    """

    sources: tuple[MixedSource, ...]
    stages: tuple[WeightStage, ...]
    linear: bool = False

    @property
    def length(self) -> int:
        """Number of samples of all sources."""
        return sum(source.length for source in self.sources)

    def at(self, step: int) -> tuple[Fraction, ...]:
        """Return the weight of each source in a step; they sum to one."""
        number = bisect_right(self.stages, step, key=lambda stage: stage.step) - 1
        stage = self.stages[number]
        weights = _fractions(stage)
        if not self.linear or number + 1 == len(self.stages):
            return weights
        after = self.stages[number + 1]
        part = Fraction(step - stage.step, after.step - stage.step)
        return tuple(old + (new - old) * part for old, new in zip(weights, _fractions(after), strict=True))


def _fractions(stage: WeightStage) -> tuple[Fraction, ...]:
    total = sum(stage.weights)
    return tuple(Fraction(weight, total) for weight in stage.weights)


def stages_of(weights: Any, names: Sequence[str]) -> tuple[WeightStage, ...]:
    """Return the stages that a script asks for: a mapping of weights by name, or pairs (from step, mapping).

    UsageError for anything that does not say the share of every source in every step.
    """
    pairs = [(0, weights)] if isinstance(weights, Mapping) else _pairs(weights)
    steps = [step for step, _ in pairs]
    if not pairs or steps[0] != 0 or any(later <= earlier for earlier, later in pairwise(steps)):
        raise UsageError(
            f"Mixture: the stages of weights must begin with step 0 and rise; they are of the steps {steps}, and "
            '[(0, {"a": 0.9, "b": 0.1}), (1000, {"a": 0.5, "b": 0.5})] would do'
        )
    stages = tuple(WeightStage(step=step, weights=_whole(given, names, step)) for step, given in pairs)
    idle = [name for number, name in enumerate(names) if not any(stage.weights[number] for stage in stages)]
    if idle:
        raise UsageError(f"Mixture: source {idle[0]!r} has no weight in any step; give it one, or leave it out")
    return stages


def _pairs(weights: Any) -> list[tuple[int, Mapping[str, Any]]]:
    try:
        pairs = [(step, given) for step, given in weights]
    except (TypeError, ValueError):
        pairs = [(None, weights)]
    for step, given in pairs:
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(given, Mapping):
            raise UsageError(
                f"Mixture: weights are a dict by source, or a list of (from step, dict); {(step, given)!r} is neither"
            )
    return pairs


def _whole(given: Mapping[str, Any], names: Sequence[str], step: int) -> tuple[int, ...]:
    """Return whole numbers, without a common divisor, in the proportions of the weights of one stage."""
    where = f"Mixture: the weights from step {step} on"
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(f"{where} name {unknown[0]!r}, which is no source; the sources are {', '.join(names)}")
    for name, weight in given.items():
        number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{where} must be numbers from 0 to 1; that of {name!r} is {weight!r}")
        if 0 < weight < 1 / FINEST:
            raise UsageError(f"{where}: {weight!r} of {name!r} is less than one sample in a million; make it 0 or more")
    total = math.fsum(given.values())
    if abs(total - 1) > TOLERANCE:
        raise UsageError(f"{where} must sum to one, and sum to {total:g}; divide each of them by that, if you mean it")
    exact = [Fraction(given.get(name, 0)).limit_denominator(FINEST) for name in names]
    units = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * units) for weight in exact] if units <= UNITS else [round(w * UNITS) for w in exact]
    common = math.gcd(*whole)
    return tuple(weight // common for weight in whole)
