"""Stratified sampling: shares of each batch, every sample once per epoch, and what cannot be stratified."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data import Batches, Growing, Order, Stratified, check
from elastic3d.data.ledger import Ledger
from elastic3d.errors import StateError, UsageError
from elastic3d.training import state_facts
from elastic3d.training.state_facts import StateFacts
from elastic3d.values import from_json, to_json
from tests.data.mixing import Numbers, trained

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=7).map(tuple)


def order_of(strata: tuple[int, ...], batch: int, seed: int = 0, **more: Any) -> Order:
    return Order(length=sum(strata), global_batch=batch, micro_batch=1, seed=seed, strata=strata, **more)


def counted(order: Order, batch: int, stop: int) -> list[list[int]]:
    """Return the samples of each stratum in every `batch` positions up to `stop`."""
    strata = np.searchsorted(np.cumsum(order.strata), order.samples(0, stop).astype(np.int64), side="right")
    return [
        np.bincount(strata[first : first + batch], minlength=len(order.strata)).tolist()
        for first in range(0, stop - batch + 1, batch)
    ]


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 60), st.integers(0, 2**64))
def test_every_sample_comes_once_per_epoch(strata: tuple[int, ...], batch: int, seed: int) -> None:
    """Whether or not the global batch divides the data set, or is larger than it."""
    order, length = order_of(strata, batch, seed), sum(strata)
    for epoch in range(4):
        assert sorted(order.samples(epoch * length, (epoch + 1) * length).tolist()) == list(range(length))


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 60), st.integers(0, 2**64))
def test_each_batch_has_every_share_rounded_down_or_up(strata: tuple[int, ...], batch: int, seed: int) -> None:
    """Exactly the share where it is whole; where an epoch ends within the batch, less than four from it."""
    order, length = order_of(strata, batch, seed), sum(strata)
    for step, counts in enumerate(counted(order, batch, 4 * length)):
        first, stop = order.positions(step)
        for count, size in zip(counts, strata, strict=True):
            share = Fraction(batch * size, length)
            if first // length == (stop - 1) // length:
                assert floor(share) <= count <= ceil(share)
            else:
                assert abs(count - share) < 4


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=3), st.integers(0, 200))
def test_later_batches_change_no_sample_of_earlier_positions(
    strata: tuple[int, ...], batch: int, later: list[int], reached: int
) -> None:
    """A run may be given other global batches from a step on: what is consumed depends on the first one alone."""
    changes = tuple((step + 1, size) for step, size in enumerate(later))
    one, other = order_of(strata, batch), order_of(strata, batch, changes=changes)
    assert one.samples(0, reached).tolist() == other.samples(0, reached).tolist()


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 20), st.integers(0, 300), st.integers(0, 300))
def test_any_stretch_is_that_of_the_whole_order(strata: tuple[int, ...], batch: int, one: int, other: int) -> None:
    """A sample is found from its position alone."""
    order, (first, stop) = order_of(strata, batch), sorted((one, other))
    assert order.samples(first, stop).tolist() == order.samples(0, 300).tolist()[first:stop]


LABELS = ["cat"] * 17 + ["dog"] * 9 + ["eel"] * 4


def stratified() -> Stratified:
    return Stratified(Numbers(30), labels=LABELS)


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 6), (2, 2), (3, 3), (4, 1), (5, 6)])
def test_batches_do_not_depend_on_the_layout(dp: int, micro_batch: int) -> None:
    """The same samples in the same order for any dp and micro-batch, and from any step; the ledger proves them."""
    whole, ledger = trained(stratified, dp=1, global_batch=6, micro_batch=6, steps=range(11))
    assert trained(stratified, dp=dp, global_batch=6, micro_batch=micro_batch, steps=range(11))[0] == whole
    resumed, rest = trained(stratified, dp=dp, global_batch=6, micro_batch=micro_batch, steps=range(7, 11))
    assert resumed == whole[7:]
    order = Batches(stratified(), global_batch=6, micro_batch=micro_batch, seed=5).order
    assert check((*trained(stratified, dp=1, global_batch=6, micro_batch=6, steps=range(7))[1], *rest), order).whole
    assert check(ledger, order).whole
    assert not check(ledger, replace(order, strata=(30,))).whole
    assert Counter(LABELS[sample] for step in whole[:5] for sample in step) == {"cat": 17, "dog": 9, "eel": 4}
    assert sorted(sample for step in whole[5:10] for sample in step) == list(range(30))


def test_micro_batches_are_near_their_shares() -> None:
    """Labels are spread over a batch: no micro-batch is of one alone."""
    data = Stratified(Numbers(1000), labels=[number % 2 for number in range(1000)])
    batches = Batches(data, global_batch=64, micro_batch=8, seed=3)
    for step in range(15):
        for index in range(8):
            odd = sum(int(data.row[sample]) % 2 for sample in batches.order.micro_batch_samples(step, index))
            assert 2 <= odd <= 6


def test_the_seed_determines_the_order_within_labels() -> None:
    """Another seed gives another order, and another epoch another one again."""
    orders = {
        tuple(order_of((40, 20), 6, seed).samples(60 * epoch, 60 * epoch + 60)) for seed in (1, 2) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_growing_batches_keep_the_stretches_of_the_first() -> None:
    """Each 6 positions have their shares, whatever batches they are in."""
    order = Batches(stratified(), global_batch=Growing((0, 6), (2, 12)), micro_batch=6, seed=1).order
    assert all(dog in (1, 2) and eel in (0, 1) and cat in (3, 4) for cat, dog, eel in counted(order, 6, 30))


def test_the_order_is_part_of_the_format() -> None:
    """A recorded order never changes, so that a run restored by a later version goes on as it began."""
    assert order_of((5, 3, 2), 4, 17).samples(8, 22).tolist() == PINNED
    order = order_of((5, 3, 2), 4, 17)
    assert from_json(Order, to_json(order)) == order


def test_names_and_fingerprints_are_those_of_the_data_set() -> None:
    """An error is about a sample as people know it; other labels are another data set."""
    data = Stratified(Numbers(4), labels=torch.tensor([7, -1, 7, -1]))
    assert (data.labels, data.strata, data.row.tolist()) == ([-1, 7], (2, 2), [1, 3, 0, 2])
    assert data.name_of(2) == "sample 0 of the data set (label 7)"
    assert int(data[1][0]) == 3
    same, other = (Stratified(Numbers(4), labels=labels) for labels in ([7, -1, 7, -1], [7, -1, -1, 7]))
    assert data.fingerprint == same.fingerprint != other.fingerprint
    assert Batches(data, global_batch=2, micro_batch=1, seed=0).fingerprint == data.fingerprint
    with pytest.raises(IndexError):
        data[4]


def test_a_state_of_other_strata_is_refused() -> None:
    """Also one of the same data set that was not stratified."""
    no_ledger: Ledger = ()
    facts = StateFacts(step=3, order=order_of((6, 4), 2), ledger=no_ledger, optimizer_groups=(), schedule=None)
    assert state_facts.check_facts(facts, 3, order_of((6, 4), 2)) == ""
    for strata in ((5, 5), ()):
        with pytest.raises(StateError, match=r"trained on 2 strata of a stratified data set and run.batches now has"):
            state_facts.check_facts(facts, 3, replace(order_of((6, 4), 2), strata=strata))


class Stream:
    """No map-style data set."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "labels", "says"),
    [
        (Numbers(3), [1, 2], r"one for each of 3 samples; they are an array of shape \[2\]"),
        (Numbers(3), [[1], [2], [3]], r"of shape \[3, 1\]"),
        (Numbers(3), [[1], [2, 3], [4]], "one for each of 3 samples"),
        (Numbers(2), [1.0, float("nan")], "whole numbers or strings, not float64"),
        (Numbers(2), ["a", None], "not object"),
        (Numbers(3), None, r"of shape \[\]"),
        (Numbers(0), [], "empty"),
        (Numbers(5000), range(5000), "5,000 strata are more than the 4,096"),
        (Stream(), [], "map-style data set, with len"),
        (Stratified(Numbers(2), labels=[1, 2]), [1, 2], "stratified already"),
    ],
)
def test_what_cannot_be_stratified_is_refused(data: Any, labels: Any, says: str) -> None:
    """When it is made, with what would do."""
    with pytest.raises(UsageError, match=says):
        Stratified(data, labels=labels)


PINNED = [4, 9, 8, 4, 9, 6, 3, 1, 7, 5, 2, 0, 1, 3]
