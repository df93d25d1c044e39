"""Holes in the order of samples: nothing shifts, and consumed and excluded together are all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from elastic3d.data import Batches, Order, Share, check
from elastic3d.data.holes import Holes, between, inside, joined, length
from elastic3d.data.ledger import Ledger, add
from elastic3d.data.positions import fold_sums
from elastic3d.data.sizes import Parts
from elastic3d.errors import UsageError

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)


def covered(holes: Holes) -> set[int]:
    return {position for first, stop in holes for position in range(first, stop)}


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_holes_are_sets_of_positions(some: list[tuple[int, int]], first: int, stop: int) -> None:
    """In order, apart from each other; what is inside and what is between are what they say."""
    holes = joined(some)
    assert covered(holes) == {position for begin, end in some for position in range(begin, end)}
    assert all(one[1] < other[0] for one, other in pairwise(holes))
    within, rest = tuple(inside(holes, first, stop)), tuple(between(holes, first, stop))
    assert covered(within) == covered(holes) & set(range(first, stop))
    assert covered(rest) == set(range(first, stop)) - covered(holes)
    assert length(within) == len(covered(within))


def batches(holes: Holes, *, dp: int = 1, index: int = 0, leaf: int = 1, parts: Parts = ((0, 8),)) -> Batches:
    data = TensorDataset(torch.arange(23), torch.arange(23))
    (_, first), *changes = parts
    made = Batches(
        data, global_batch=first, micro_batch=2, seed=5, exclude=holes, share=Share(dp=dp, index=index, leaf=leaf)
    )
    made.order = replace(made.order, changes=tuple(changes))
    return made


def made(some: list[Batches], steps: int) -> tuple[list[list[int]], Ledger]:
    """Return the samples of each step that count, over all replicas, and the run's ledger."""
    by_step: list[list[int]] = [[] for _ in range(steps)]
    sums = [[0, 0, 0, 0] for _ in range(steps)]
    for one in some:
        for batch in one.until(step=steps):
            for part in batch.micro_batches:
                if part.counts:
                    by_step[batch.step] += part.input.tolist()
            said = (batch.samples, batch.sample_sum, batch.excluded_samples, batch.excluded_sum)
            sums[batch.step] = [a + b for a, b in zip(sums[batch.step], said, strict=True)]
            one.step += 1
    ledger: Ledger = ()
    for step, (samples, total, excluded, excluded_sum) in enumerate(sums):
        ledger = add(
            ledger,
            generation=1,
            step=step,
            layout="",
            samples=samples,
            sample_sum=fold_sums([total]),
            excluded=excluded,
            excluded_sum=fold_sums([excluded_sum]),
        )
    return [sorted(step) for step in by_step], ledger


HOLES = ((2, 4), (12, 20))


@pytest.mark.parametrize(("dp", "leaf"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_nothing_takes_the_place_of_what_is_excluded(dp: int, leaf: int) -> None:
    """All other samples stay in their steps, under any number of replicas, and the account says so."""
    holes = tuple(batches(HOLES, leaf=1).order.whole_holes(leaf).holes)
    steps, ledger = made([batches(holes, dp=dp, index=index, leaf=leaf) for index in range(dp)], 6)
    whole, _ = made([batches(())], 6)
    order = batches(holes).order
    for step in range(6):
        first, stop = order.positions(step)
        lost = [int(order.samples(one, one + 1)[0]) for one in sorted(covered(tuple(inside(holes, first, stop))))]
        assert sorted(steps[step] + lost) == whole[step]
    account = check(ledger, order)
    assert account.whole
    assert (account.consumed, account.excluded) == (48 - length(holes), length(holes))
    assert not check(ledger, replace(order, holes=())).whole
    assert not check(ledger, replace(order, holes=((4, 6), *holes[1:]))).whole


@given(ranges, st.sampled_from([1, 2]))
def test_holes_widen_to_whole_leaves(some: list[tuple[int, int]], leaf: int) -> None:
    """To the fewest, in growing batches too; what is whole stays as it is."""
    order = Order(length=None, global_batch=4, micro_batch=2, seed=1, changes=((2, 8),), holes=joined(some))
    wide = order.whole_holes(leaf)
    assert covered(order.holes) <= covered(wide.holes)
    assert wide.whole_holes(leaf) == wide
    for step in range(8):
        numbers = order.excluded(step)
        leaves = {number // leaf for number in numbers}
        assert set(wide.excluded(step)) == {leaf * one + inner for one in leaves for inner in range(leaf)}


def test_a_step_that_is_made_again_is_as_if_it_had_been_known() -> None:
    """What is excluded after it was loaded counts as what was excluded before."""
    late, known = batches(()), batches(((10, 12),))
    late.step = known.step = 1
    one, other = next(late.until(step=2)), next(known.until(step=2))
    assert late.exclude(1, [1]) == ((10, 12),)
    again = late.counted_anew(one)
    assert (again.samples, again.sample_sum, again.excluded) == (other.samples, other.sample_sum, other.excluded)
    assert (again.excluded_samples, again.excluded_sum) == (other.excluded_samples, other.excluded_sum)
    assert [part.counts for part in again.micro_batches] == [part.counts for part in other.micro_batches]
    assert (again.divisor(again.micro_batches[0]), late.order) == (3, known.order)


def test_what_was_consumed_before_a_state_stays_consumed() -> None:
    """A script may exclude what lies ahead; of what lies behind, the state knows better, and it is said."""
    one = batches(((0, 2), (16, 18)))
    said = one.go_on(2, None, replace(one.order, holes=((6, 8), (20, 22))))
    assert one.order.holes == ((6, 8), (16, 18), (20, 22))
    assert "(0, 2)" in said
    two = batches(((6, 8),))
    assert two.go_on(2, None, two.order) == ""


@pytest.mark.parametrize("exclude", [((1, 3),), ((4, 4),), ((-2, 0),), 7, ((1,),), (("a", "b"),), ((0, True),)])
def test_what_is_no_hole_is_refused(exclude: Holes) -> None:
    """Before anything is loaded, with what would do where that can be said."""
    with pytest.raises(UsageError, match="exclude"):
        batches(exclude)


def test_holes_that_shift_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: what comes after a hole moves up into it. The account does not pass then."""
    places = Order.micro_batch_places

    def shifted(order: Order, step: int, index: int) -> list[tuple[int, int]]:
        first = order.positions(step)[0] + index * order.micro_batch
        before = length(inside(order.holes, 0, first))
        samples = order.samples(first + before, first + before + order.micro_batch)
        return [(position, int(sample)) for position, sample in enumerate(samples, start=first)]

    order = batches(HOLES).order
    assert check(made([batches(HOLES)], 6)[1], order).whole
    monkeypatch.setattr(Order, "micro_batch_places", shifted)
    assert not check(made([batches(HOLES)], 6)[1], order).whole
    monkeypatch.setattr(Order, "micro_batch_places", places)
