"""The curves of a run: loss and seconds of each step, in bounded memory whatever its length. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST = 1536
"""Points that are kept: a screen has hardly more columns."""

CHUNK = 64
"""Points that are sent together."""

LAST_STEP = 1 << 53
"""Above it JSON's numbers, as browsers read them, are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step as somebody reported it. loss: None where it is not known or not finite."""

    step: int
    loss: float | None
    seconds: float
    generation: int


def step_figures(step: int | None, loss: object, seconds: float, generation: int) -> StepFigures | None:
    """Return the figures of a step as events have them, its loss as `float.hex()`; None for nonsense."""
    if step is None:
        return None
    try:
        value = float.fromhex(loss) if isinstance(loss, str) else float(loss) if isinstance(loss, int | float) else None
        seconds = float(seconds)
    except (ValueError, OverflowError):
        return None
    if value is not None and not math.isfinite(value):
        value = None
    return StepFigures(step=step, loss=value, seconds=seconds, generation=generation)


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """Successive steps that are drawn as one point; `finite` of them have a loss."""

    step: int
    generation: int
    count: int = 0
    finite: int = 0
    loss: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    seconds: float = 0.0

    def add(self, other: _Bucket) -> None:
        self.step, self.generation = other.step, other.generation
        self.count += other.count
        self.finite += other.finite
        self.loss += other.loss
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.seconds += other.seconds


class StepSeries:
    """Steps in order, each once.

    Up to `most` points; beyond that all points stand for twice as many steps each: a power of two. What was repeated
    after a failure replaces what was there: a run has one curve through all its generations.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._width = most, 1
        self._buckets: list[_Bucket] = []
        self.newest: list[StepFigures] = []
        """The last steps as they were reported, at most ten."""

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, figures: StepFigures) -> bool:
        """Take a step; return whether it is new. Steps of one generation that come late are passed over."""
        step, last = figures.step, self._buckets[-1] if self._buckets else None
        if not 0 <= step <= LAST_STEP or not (math.isfinite(figures.seconds) and figures.seconds >= 0):
            return False
        if last is not None and step <= last.step:
            if figures.generation <= last.generation:
                return False
            self._forget_from(step)
        bucket = _Bucket(step=step, generation=figures.generation, count=1, seconds=figures.seconds)
        if figures.loss is not None and math.isfinite(figures.loss):
            bucket.finite, bucket.loss, bucket.low, bucket.high = 1, figures.loss, figures.loss, figures.loss
        self._append(bucket)
        if len(self._buckets) > self._most:
            self._widen()
        self.newest = [*self.newest[-9:], figures]
        return True

    def chunks(self) -> dict[str, list[list[float | int | None]]]:
        """Return the points by number of their chunk, each [step, loss, seconds, generation, lowest loss, highest].

        Loss is the mean of the steps that the point stands for, seconds too; the last two are left out where it stands
        for one.
        """
        points = [_point(bucket) for bucket in self._buckets]
        return {str(at // CHUNK): points[at : at + CHUNK] for at in range(0, len(points), CHUNK)}

    def _append(self, bucket: _Bucket) -> None:
        last = self._buckets[-1] if self._buckets else None
        if last is not None and last.step // self._width == bucket.step // self._width:
            last.add(bucket)
        else:
            self._buckets.append(bucket)

    def _widen(self) -> None:
        while len(self._buckets) > self._most:
            self._width *= 2
            buckets, self._buckets = self._buckets, []
            for bucket in buckets:
                self._append(bucket)

    def _forget_from(self, step: int) -> None:
        first = step // self._width
        while self._buckets and self._buckets[-1].step // self._width >= first:
            self._buckets.pop()
        self.newest = [figures for figures in self.newest if figures.step < step]


def _point(bucket: _Bucket) -> list[float | int | None]:
    loss = _short(bucket.loss / bucket.finite) if bucket.finite else None
    point = [bucket.step, loss, _short(bucket.seconds / bucket.count), bucket.generation]
    return [*point, _short(bucket.low), _short(bucket.high)] if bucket.finite > 1 else point


def _short(value: float) -> float:
    return float(f"{value:.6g}")
