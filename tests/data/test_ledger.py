from __future__ import annotations

from dataclasses import replace

from elastic3d.data import Line, Order, check
from elastic3d.data.ledger import Ledger, add, resumed, stopped

ORDER = Order(length=13, global_batch=6, micro_batch=2, seed=3)


def stepped(ledger: Ledger, generation: int, first: int, stop: int) -> Ledger:
    for step in range(first, stop):
        bounds = (step * ORDER.global_batch, (step + 1) * ORDER.global_batch)
        ledger = add(
            ledger,
            generation=generation,
            step=step,
            layout="pp 1",
            samples=bounds[1] - bounds[0],
            sample_sum=ORDER.sum_of_positions(*bounds),
        )
    return ledger


def test_steps_of_one_generation_are_one_line() -> None:
    """A new generation begins a new line."""
    ledger = stepped(stepped((), 1, 0, 5), 2, 5, 9)
    assert [(line.generation, line.first_step, line.stop_step, line.samples) for line in ledger] == [
        (1, 0, 5, 30),
        (2, 5, 9, 24),
    ]
    account = check(ledger, ORDER)
    assert account.whole
    assert account.consumed == 54


def test_a_run_that_its_script_ended_says_so_until_it_goes_on() -> None:
    """Of its last step alone, which another generation may have made."""
    ledger = add(stepped((), 1, 0, 3), generation=1, step=3, layout="pp 1", samples=6, sample_sum=0, stopped="enough")
    assert [(line.stop_step, line.stopped) for line in ledger] == [(4, "enough")]
    assert (stopped(ledger, 4), stopped(ledger, 3), stopped((), 0)) == ("enough", "", "")
    assert stopped(resumed(ledger), 4) == ""
    assert replace(resumed(ledger)[0], stopped="enough") == ledger[0]


def test_gaps_are_missing_and_overlaps_repeated() -> None:
    """Steps in no line and steps in two are counted in samples."""
    gap = check((*stepped((), 1, 0, 3), *stepped((), 2, 4, 6)), ORDER)
    assert (gap.consumed, gap.repeated, gap.missing, gap.wrong) == (30, 0, 6, ())
    overlap = check((*stepped((), 1, 0, 4), *stepped((), 2, 2, 6)), ORDER)
    assert (overlap.consumed, overlap.repeated, overlap.missing) == (36, 12, 0)
    late = check(stepped((), 1, 1, 3), ORDER, stop_step=5)
    assert (late.consumed, late.missing) == (12, 18)
    assert not any(account.whole for account in (gap, overlap, late))


def test_a_line_within_another_is_repeated_once() -> None:
    """A short line inside a long one counts only its own steps."""
    account = check((*stepped((), 1, 0, 6), *stepped((), 2, 2, 3)), ORDER)
    assert (account.consumed, account.repeated, account.missing) == (36, 6, 0)


def test_a_wrong_sample_changes_the_sum() -> None:
    """The right count with one wrong sample does not pass."""
    (line,) = stepped((), 1, 0, 4)
    assert check((replace(line, sample_sum=line.sample_sum ^ 1),), ORDER).wrong
    assert check((replace(line, samples=line.samples - 1),), ORDER).wrong
    assert check((line,), replace(ORDER, seed=4)).wrong


def test_an_empty_ledger_is_complete() -> None:
    """An empty ledger of no steps has neither gap nor overlap."""
    assert check((), ORDER).whole
    assert isinstance(stepped((), 1, 0, 1)[0], Line)
