"""The account of which steps consumed which samples, carried in the state and so exactly as old as the state.

Consecutive steps under one generation are one line. Each step adds the number of samples that its ranks really loaded
and the keyed sum of their ids, both gathered by the step vote, so that `check` proves by counting that every position
of the run was consumed once: a gap or an overlap of positions shows in the lines' bounds, a wrong sample in the sums.
What is excluded is accounted for likewise, beside it: consumed and excluded together are all positions, and none of
them is both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from elastic3d.data.holes import between, inside
from elastic3d.data.positions import STRIDE, Order, fold_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Steps [first_step, stop_step) as one generation made them; samples: how many; sample_sum: keyed sum of ids.

    excluded, excluded_sum: the same of those that were left out. changed: what the script was allowed to change before
    them, in words; "" for nothing. stopped: why the script ended the run after the last of them, "" where it did not.
    """

    generation: int
    first_step: int
    stop_step: int
    layout: str
    samples: int
    sample_sum: int
    excluded: int = 0
    excluded_sum: int = 0
    changed: str = ""
    stopped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The result of checking a ledger. consumed, repeated, missing, excluded: positions.

    wrong: lines of wrong counts or sums.
    """

    consumed: int
    repeated: int
    missing: int
    excluded: int = 0
    wrong: tuple[Line, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every position was consumed exactly once, or excluded."""
        return not (self.repeated or self.missing or self.wrong)


Ledger = tuple[Line, ...]


def add(
    ledger: Ledger,
    *,
    generation: int,
    step: int,
    layout: str,
    samples: int,
    sample_sum: int,
    excluded: int = 0,
    excluded_sum: int = 0,
    changed: str = "",
    stopped: str = "",
) -> Ledger:
    """Return the ledger with the step from `step` to `step + 1` added. changed, stopped: as in `Line`, of this step."""
    if ledger and not changed:
        last = ledger[-1]
        if (last.generation, last.stop_step, last.layout) == (generation, step, layout):
            longer = replace(
                last,
                stop_step=step + 1,
                samples=last.samples + samples,
                sample_sum=fold_sums((last.sample_sum, sample_sum)),
                excluded=last.excluded + excluded,
                excluded_sum=fold_sums((last.excluded_sum, excluded_sum)),
                stopped=stopped,
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
            excluded=excluded,
            excluded_sum=excluded_sum,
            changed=changed,
            stopped=stopped,
        ),
    )


def left_out(ledger: Ledger, order: Order, *, generation: int, layout: str, first_step: int, stop_step: int) -> Ledger:
    """Return the ledger with steps added that this run does not make, all whose positions are excluded."""
    first, stop = order.positions(first_step, stop_step)
    line = Line(
        generation=generation,
        first_step=first_step,
        stop_step=stop_step,
        layout=layout,
        samples=0,
        sample_sum=0,
        excluded=stop - first,
        excluded_sum=order.sum_of_positions(first, stop),
    )
    return (*ledger, line)


def stopped(ledger: Ledger, step: int) -> str:
    """Return why the script ended the run after `step` steps, "" where it did not."""
    return ledger[-1].stopped if ledger and ledger[-1].stop_step == step else ""


def resumed(ledger: Ledger) -> Ledger:
    """Return the ledger of a run that goes on though its script had ended it."""
    return (*ledger[:-1], replace(ledger[-1], stopped=""))


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

    def total(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
        nonlocal done
        number, sums = 0, []
        for first, stop in parts:
            for start in range(first, stop, STRIDE):
                reached = min(stop, start + STRIDE)
                sums.append(order.sum_of_positions(start, reached))
                number, done = number + reached - start, done + reached - start
                if progress is not None:
                    progress(done)
        return number, fold_sums(sums)

    for line in lines:
        bounds = order.positions(line.first_step, line.stop_step)
        consumed, excluded = total(between(order.holes, *bounds)), total(inside(order.holes, *bounds))
        if (line.samples, line.sample_sum) != consumed or (line.excluded, line.excluded_sum) != excluded:
            wrong.append(line)
    begin, end = order.positions(first_step, max(first_step, stop))
    account = count((order.positions(line.first_step, line.stop_step) for line in lines), first=begin, stop=end)
    left_out = sum(line.excluded for line in lines)
    return replace(account, consumed=account.consumed - left_out, excluded=left_out, wrong=tuple(wrong))


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
