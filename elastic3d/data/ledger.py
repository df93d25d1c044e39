"""The account of which steps consumed which samples, carried in the state and so exactly as old as the state.

A run of steps under one generation is one line. Each step adds the number of samples its ranks really loaded and the
keyed sum of their ids, both measured by the step vote, so that `check` proves by counting that every position of the
run was consumed once: a gap or an overlap of positions shows in the lines' bounds, a wrong sample in the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic3d.data.positions import Order, fold_sums


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
    """What a ledger proves. consumed, repeated, missing: positions. wrong: lines whose counts or sums do not fit."""

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


def check(ledger: Ledger, order: Order, *, first_step: int = 0, stop_step: int | None = None) -> Account:
    """Return what the ledger proves about steps [first_step, stop_step); by default up to its last step."""
    stop = max((line.stop_step for line in ledger), default=first_step) if stop_step is None else stop_step
    consumed = repeated = missing = 0
    reached = first_step
    wrong = []
    for line in sorted(ledger, key=lambda line: (line.first_step, line.stop_step)):
        missing += _size(order, reached, line.first_step)
        repeated += _size(order, line.first_step, min(reached, line.stop_step))
        consumed += _size(order, max(reached, line.first_step), line.stop_step)
        reached = max(reached, line.stop_step)
        bounds = order.positions(line.first_step, line.stop_step)
        if line.samples != bounds[1] - bounds[0] or line.sample_sum != order.sum_of_positions(*bounds):
            wrong.append(line)
    missing += _size(order, reached, stop)
    return Account(consumed=consumed, repeated=repeated, missing=missing, wrong=tuple(wrong))


def _size(order: Order, first_step: int, stop_step: int) -> int:
    """Return how many samples the steps [first_step, stop_step) take; 0 where there is none."""
    first, stop = order.positions(first_step, max(first_step, stop_step))
    return stop - first
