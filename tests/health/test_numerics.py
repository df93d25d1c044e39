"""What follows from a step's numbers: pure functions of what all ranks have voted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.data import Order
from elastic3d.health.numerics import FEWEST, KEPT, Losses, empty_before, is_high, leaves_of, left_out_from, members
from elastic3d.rollback import exhausted
from elastic3d.values import from_json, to_json


def judged(losses: list[float], begun: Losses | None = None) -> tuple[Losses, list[int]]:
    """Return what is kept after some losses, and the numbers of those with which a spike showed."""
    kept, said = begun or Losses(), []
    for number, loss in enumerate(losses):
        kept, usual = kept.after(loss)
        said += [number] if usual is not None else []
    return kept, said


def quiet(number: int) -> list[float]:
    return [2.0 + 0.1 * math.sin(1.7 * one) for one in range(number)]


def test_a_loss_that_jumps_up_and_stays_is_said_once() -> None:
    """With the third high one of five; and again only after it had come down."""
    calm = quiet(60)
    _, said = judged([*calm, 9.0, 2.0, 9.0, 9.0, 9.0, 9.0, *calm[:10], 9.0, 9.0, 9.0])
    assert said == [63, 78]


@pytest.mark.parametrize(
    "losses",
    [
        [*quiet(60), 9.0, *quiet(10), 9.0, *quiet(10)],
        [*quiet(FEWEST - 3), 9.0, 9.0, 9.0],
        [2.0 * 0.99**one for one in range(300)],
        [2.0 + 0.005 * one for one in range(300)],
        [*quiet(60), math.nan, math.inf, math.nan, *quiet(5)],
        [2.0 + 1.5 * (one % 3 == 0) for one in range(200)],
        [1.0] * 60 + [1.4] * 10,
    ],
    ids=["outliers", "too few", "falling", "rising slowly", "not finite", "restless", "half as much again"],
)
def test_what_is_no_spike_is_not_called_one(losses: list[float]) -> None:
    """Nothing is said of single outliers, of a run's beginning, of a trend, or of what is usual there."""
    assert judged(losses)[1] == []


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=200), st.integers(0, 200))
def test_a_restart_judges_alike(losses: list[float], cut: int) -> None:
    """What is kept says all: it goes through the state as text, and no bit is lost."""
    whole, said = judged(losses)
    begun, first = judged(losses[:cut])
    again = from_json(Losses, to_json(begun))
    later, second = judged(losses[cut:], again)
    assert (later, first + [min(cut, len(losses)) + one for one in second]) == (whole, said)
    assert len(whole.losses) <= KEPT


def test_losses_below_zero_are_judged_by_their_distance() -> None:
    """A likelihood's logarithm may have either sign."""
    before = [-10.0 + 0.1 * math.sin(one) for one in range(60)]
    assert is_high(-4.0, before)
    assert not is_high(-9.0, before)
    assert not is_high(-16.0, before)


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(1, 4))
def test_a_leaf_is_left_out_as_a_whole(numbers: set[int], leaf: int) -> None:
    """And no other one."""
    leaves = leaves_of(tuple(numbers), leaf)
    assert numbers <= set(members(leaves, leaf))
    assert all(any(number // leaf == one for number in numbers) for one in leaves)


def test_steps_of_which_nothing_is_left_are_counted_back_from_one() -> None:
    """As far as matters."""
    order = Order(length=None, global_batch=4, micro_batch=2, seed=1, holes=((0, 4), (8, 20)))
    assert [empty_before(order, step) for step in range(7)] == [0, 1, 0, 1, 2, 3, 0]
    assert empty_before(order, 5, most=2) == 2
    # Nobody tried those that the run knew of: they say nothing about what comes out.
    first = order.positions(3)
    assert empty_before(order, 5, known=(first,)) == 2
    assert empty_before(order, 5, known=((first[0], first[1] - 1),)) == 3


def test_how_far_a_run_goes_back() -> None:
    """As many steps as it is told that taught it anything, and no more than half of them."""
    order = Order(length=None, global_batch=4, micro_batch=2, seed=1)
    assert [left_out_from(order, step, 10) for step in (0, 1, 8, 18, 19, 20, 50)] == [0, 1, 4, 9, 10, 11, 41]
    order = order.excluding((order.positions(30, 40),))
    assert left_out_from(order, 45, 10) == 26
    assert left_out_from(order.excluding(((0, 200),)), 45, 10) == 0


def test_a_run_goes_back_only_so_often() -> None:
    """What came long before does not count."""
    assert not exhausted([10, 20], 30)
    assert exhausted([10, 20, 25], 30)
    assert not exhausted([10, 20, 25], 10_010)
    assert exhausted([10, 20, 25], 10_009)
