from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data import Growing, Order, check
from elastic3d.data.ledger import Ledger, add
from elastic3d.errors import ConfigurationError, StateError, UsageError
from elastic3d.training import state_facts
from elastic3d.training.state_facts import StateFacts
from elastic3d.values import from_json, to_json

ORDER = Order(length=37, global_batch=4, micro_batch=2, seed=1, changes=((2, 8), (5, 6)))

growing = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=0, max_size=4).map(
    lambda gaps: tuple((sum(g for g, _ in gaps[: i + 1]), 2 * b) for i, (_, b) in enumerate(gaps))
)


@settings(max_examples=80, deadline=None)
@given(growing, st.integers(0, 60))
def test_positions_are_the_sum_of_all_earlier_batches(changes: tuple[tuple[int, int], ...], step: int) -> None:
    """The closed form equals adding up step by step, and step_at is its inverse."""
    order = Order(length=11, global_batch=2, micro_batch=2, seed=0, changes=changes)
    reached = sum(order.batch_at(before) for before in range(step))
    assert order.positions(step) == (reached, reached + order.batch_at(step))
    for position in range(*order.positions(step)):
        assert order.step_at(position) == step


def test_an_order_with_growing_batches_reads_back() -> None:
    """The facts of a checkpoint have every size; those of an earlier release, which have none, still read."""
    assert from_json(Order, to_json(ORDER)) == ORDER
    old = {"length": 37, "global_batch": 4, "micro_batch": 2, "seed": 1}
    assert from_json(Order, old) == Order(length=37, global_batch=4, micro_batch=2, seed=1)


def test_a_layout_must_fit_the_smallest_step() -> None:
    """M differs between steps; the planner is given the smallest."""
    assert ORDER.micro_batches == 2
    assert ORDER.counts == (2, 3, 4)
    assert [ORDER.micro_batches_at(step) for step in (0, 1, 2, 4, 5, 99)] == [2, 2, 4, 4, 3, 3]


def stepped(first: int, stop: int) -> Ledger:
    ledger: Ledger = ()
    for step in range(first, stop):
        bounds = ORDER.positions(step)
        ledger = add(
            ledger,
            generation=1,
            step=step,
            layout="",
            samples=bounds[1] - bounds[0],
            sample_sum=ORDER.sum_of_positions(*bounds),
        )
    return ledger


def test_the_ledger_of_growing_batches_is_checked_in_samples() -> None:
    """Lines that span a change of size are complete; missing and repeated samples are counted by each step's size."""
    whole = check(stepped(0, 8), ORDER)
    assert whole.whole
    assert whole.consumed == 2 * 4 + 3 * 8 + 3 * 6
    torn = check((*stepped(0, 3), *stepped(4, 6), *stepped(5, 7)), ORDER)
    assert (torn.missing, torn.repeated, torn.wrong) == (8, 6, ())


def test_sizes_of_past_steps_may_not_change_and_later_ones_may() -> None:
    """A run may be given another future, but another past could not be accounted for."""
    facts = StateFacts(step=5, order=ORDER, ledger=(), optimizer_groups=(), schedule=None)
    later = Order(length=37, global_batch=4, micro_batch=2, seed=1, changes=((2, 8), (7, 16)))
    state_facts.check_facts(facts, 5, later)
    other = Order(length=37, global_batch=4, micro_batch=2, seed=1, changes=((3, 8),))
    with pytest.raises(StateError, match=r"global_batch=Growing\(\(0, 4\), \(2, 8\)\) and run.batches now has Growing"):
        state_facts.check_facts(facts, 5, other)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Growing(), "begin with 0"),
        (lambda: Growing((1, 4)), "begin with 0"),
        (lambda: Growing((0, 4), (5, 8), (5, 16)), "rise"),
        (lambda: Growing((0, 4), (5, 0)), "1 or more"),
        (lambda: Growing(256), "256 is none"),  # type: ignore[arg-type]
        (lambda: Growing((0, 4.0)), "whole numbers"),  # type: ignore[arg-type]
    ],
)
def test_a_batch_size_that_is_no_function_of_the_step_is_refused(make: Callable[[], Growing], says: str) -> None:
    """The message shows what would do."""
    with pytest.raises(UsageError, match=says):
        make()


def test_a_micro_batch_must_divide_every_size() -> None:
    """The size that does not fit is named with its step."""
    with pytest.raises(ConfigurationError, match=r"global_batch=10 \(from step 7 on\); micro_batch=2 or .*=12 would"):
        Order(length=10, global_batch=8, micro_batch=4, seed=0, changes=((7, 10),))
