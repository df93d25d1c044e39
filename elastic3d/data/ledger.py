"""The account of which steps consumed which samples, carried in the state and so exactly as old as the state.

Consecutive steps under one generation are one line. Each step adds the number of samples that its ranks really loaded
and the keyed sum of their ids, both gathered by the step vote, so that `check` proves by counting that every position
of the run was consumed once: a gap or an overlap of positions shows in the lines' bounds, a wrong sample in the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from elastic3d.data.positions import STRIDE, Order, fold_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Steps [first_step, stop_step) as one generation made them; samples: how many; sample_sum: keyed sum of ids."""

    generation: int
    first_step: int
    stop_step: int
    layout: str
    samples: int
    sample_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result of checking a ledger. consumed, repeated, missing: positions. wrong: lines of wrong counts or sums."""

    consumed: int
    repeated: int
    missing: int
    wrong: tuple[Line, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every position was consumed exactly once."""
        return not (self.repeated or self.missing or self.wrong)


Ledger = tuple[Line, ...]


def add(ledger: Ledger, *, generation: int, step: int, layout: str, samples: int, sample_sum: int) -> Ledger:
    """Return the ledger with the step from `step` to `step + 1` added."""
    if ledger:
        last = ledger[-1]
        if (last.generation, last.stop_step, last.layout) == (generation, step, layout):
            longer = replace(
                last,
                stop_step=step + 1,
                samples=last.samples + samples,
                sample_sum=fold_sums((last.sample_sum, sample_sum)),
            )
            return (*ledger[:-1], longer)
    return (
        *ledger,
        Line(
            generation=generation,
            first_step=step,
            stop_step=step + 1,
            layout=layout,
            samples=samples,
            sample_sum=sample_sum,
        ),
    )


def check(
    ledger: Ledger,
    order: Order,
    *,
    first_step: int = 0,
    stop_step: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Account:
    """Return what the ledger proves about steps [first_step, stop_step); by default up to its last step.

    progress: called with how many samples were added up.
    """
    stop = max((line.stop_step for line in ledger), default=first_step) if stop_step is None else stop_step
    lines = sorted(ledger, key=lambda line: (line.first_step, line.stop_step))
    wrong, done = [], 0
    for line in lines:
        first, end = order.positions(line.first_step, line.stop_step)
        sums = []
        for start in range(first, end, STRIDE):
            reached = min(end, start + STRIDE)
            sums.append(order.sum_of_positions(start, reached))
            done += reached - start
            if progress is not None:
                progress(done)
        if line.samples != end - first or line.sample_sum != fold_sums(sums):
            wrong.append(line)
    begin, end = order.positions(first_step, max(first_step, stop))
    account = count((order.positions(line.first_step, line.stop_step) for line in lines), first=begin, stop=end)
    return replace(account, wrong=tuple(wrong))


def count(ranges: Iterable[tuple[int, int]], *, first: int = 0, stop: int | None = None) -> Account:
    """Return how often half-open ranges of positions, in order, cover [first, stop); by default up to the last."""
    consumed = repeated = missing = 0
    reached = first
    for begin, end in ranges:
        missing += max(0, begin - reached)
        repeated += max(0, min(reached, end) - begin)
        consumed += max(0, end - max(reached, begin))
        reached = max(reached, end)
    missing += max(0, (reached if stop is None else stop) - reached)
    return Account(consumed=consumed, repeated=repeated, missing=missing)
