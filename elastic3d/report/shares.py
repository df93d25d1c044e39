"""Parts of a run's time, as few as can be seen: bands of a node's categories, and what was made in each part. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from elastic3d.accounting.past_run import PastGeneration
from elastic3d.accounting.recorded_events import SECOND
from elastic3d.accounting.spans import Category, Span
from elastic3d.report.document import ThroughputPoint, TimeBand

COLUMNS = 600
"""Most parts that the run's time is cut into for a node's bands."""

PARTS = 240
"""Parts that it is cut into for the throughput."""


def bands(spans: Sequence[Span], first: int, last: int) -> tuple[TimeBand, ...]:
    """Return a node's spans, or, where there are more than `COLUMNS`, what most of each of so many equal parts was.

    first, last: of the run, in microseconds since the epoch; times of the result are since `first`.
    """
    if len(spans) <= COLUMNS:
        return tuple(TimeBand(start=s.start - first, stop=s.stop - first, category=s.category) for s in spans)
    width = max(1, -(-(last - first) // COLUMNS))
    spent: defaultdict[int, Counter[Category]] = defaultdict(Counter)
    for span in spans:
        for column in range((span.start - first) // width, (span.stop - 1 - first) // width + 1):
            begins = first + column * width
            inside = min(span.stop, begins + width) - max(span.start, begins)
            spent[column][span.category] += inside
    start, stop = spans[0].start - first, spans[-1].stop - first
    result: list[TimeBand] = []
    for column, counted in sorted(spent.items()):
        category = counted.most_common(1)[0][0]
        begins, ends = max(start, column * width), min(stop, (column + 1) * width)
        if result and result[-1].category is category and result[-1].stop == begins:
            begins = result.pop().start
        result.append(TimeBand(start=begins, stop=ends, category=category))
    return tuple(result)


def throughput(generations: Iterable[PastGeneration], first: int, last: int) -> tuple[tuple[ThroughputPoint, ...], str]:
    """Return what steps that count made in each part of the run's time, and whether that is "samples" or "steps".

    A step is made evenly from the one before it, or from its own beginning, to its commit.
    """
    made: list[tuple[int, int, int]] = []
    for generation in generations:
        before = 0
        for step in generation.steps:
            start = max(before, step.at - step.length)
            before = step.at
            if step.lost_to < 0:
                made.append((start, step.at, _samples(step.event.fields.get("samples"))))
    unit = "samples" if any(samples for _, _, samples in made) else "steps"
    if not made or last <= first:
        return (), unit
    width = -(-(last - first) // PARTS)
    amounts = [0.0] * -(-(last - first) // width)
    for start, stop, samples in made:
        amount = float(samples) if unit == "samples" else 1.0
        if stop <= start:
            amounts[min(len(amounts) - 1, max(0, stop - 1 - first) // width)] += amount
            continue
        for column in range(max(0, start - first) // width, min(len(amounts) - 1, (stop - 1 - first) // width) + 1):
            begins = first + column * width
            amounts[column] += amount * (min(stop, begins + width) - max(start, begins)) / (stop - start)
    points = []
    for column, total in enumerate(amounts):
        begins, ends = column * width, min((column + 1) * width, last - first)
        points.append(ThroughputPoint(at=(begins + ends) // 2, per_second=total * SECOND / max(1, ends - begins)))
    return tuple(points), unit


def _samples(value: object) -> int:
    """Return how many positions [first, stop) are; 0 where that is nonsense."""
    match value:
        case [int() as begins, int() as ends] if 0 <= begins <= ends < 1 << 53:
            return ends - begins
        case _:
            return 0
