"""Whether a series of samples grows: a robust line through it, and bars for its slope.

The line is Theil's and Sen's: the median of the slopes between all pairs of points, which a quarter of outliers does
not move (Sen 1968, "Estimates of the regression coefficient based on Kendall's tau"). A bar on a slope alone would call
the noise of a short run growth, and a floor alone any cache that fills up once. So a series grows only if its slope is
above the bar, by the hour or by the generation; if the growth over the run is above a floor; and if it goes on in the
later half of the run at half its slope at least, as a leak does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HOUR = 3600.0
WARM_UP = 0.25
"""Share of a run whose samples are left out: allocators, caches and code that runs for the first time settle in it."""
LONGEST_WARM_UP = 2 * HOUR
FEWEST = 12
"""Points below which nothing is said."""
_MOST = 240
"""Points beyond which neighbours are taken together: all pairs of more take long."""
_GOES_ON = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value. at: seconds since the run began."""

    at: float
    generation: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What a series may grow by. per_hour, per_generation: slopes. floor: growth over a run below which no slope
    counts; share: the same as a share of the value it begins with, whichever is more."""

    per_hour: float
    per_generation: float
    floor: float
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A line through a series without its warm-up. start: its first value, by the median of the first tenth.

    later: the slope per hour of the later half alone. growth: by the line, over the whole series.
    """

    per_hour: float
    per_generation: float
    start: float
    growth: float
    later: float


def warm_up(seconds: float) -> float:
    """Return how many seconds of a run of `seconds` are left out."""
    return min(WARM_UP * seconds, LONGEST_WARM_UP)


def fit(points: Sequence[Point], *, since: float = 0.0) -> Fit | None:
    """Return the line through the points from `since` on; None where there are too few."""
    points = [point for point in points if point.at >= since]
    if len(points) < FEWEST:
        return None
    first = [point.value for point in points[: max(3, len(points) // 10)]]
    per_second = _slope(points, lambda point: point.at)
    return Fit(
        per_hour=HOUR * per_second,
        per_generation=_slope(points, lambda point: float(point.generation)),
        start=statistics.median(first),
        growth=per_second * (points[-1].at - points[0].at),
        later=HOUR * _slope(points[len(points) // 2 :], lambda point: point.at),
    )


def grows(line: Fit, bar: Bar) -> bool:
    """Return whether a series grows by more than its bar."""
    steep = line.per_hour > bar.per_hour or line.per_generation > bar.per_generation
    return steep and line.growth > max(bar.floor, bar.share * line.start) and line.later > _GOES_ON * line.per_hour


def _slope(points: Sequence[Point], along: Callable[[Point], float]) -> float:
    """Return the median of the slopes between all pairs that differ in `along`, 0 where there are none."""
    pairs = _thinned([(along(point), point.value) for point in points])
    slopes = [
        (pairs[late][1] - pairs[early][1]) / (pairs[late][0] - pairs[early][0])
        for early in range(len(pairs))
        for late in range(early + 1, len(pairs))
        if pairs[late][0] != pairs[early][0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def _thinned(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most _MOST points: the medians of neighbours."""
    each = -(-len(pairs) // _MOST)
    groups = (pairs[at : at + each] for at in range(0, len(pairs), each))
    return [(statistics.median(x for x, _ in group), statistics.median(y for _, y in group)) for group in groups]
