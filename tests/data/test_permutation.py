from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data import KeyedPermutation

seeds = st.integers(min_value=-(2**70), max_value=2**70)


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=1, max_value=3000), seeds, st.integers(min_value=0, max_value=1000))
def test_every_sample_comes_once_per_epoch(length: int, seed: int, epoch: int) -> None:
    """A permutation of any length is a bijection."""
    samples = KeyedPermutation(length, seed, epoch).of(np.arange(length, dtype=np.uint64))
    assert sorted(samples.tolist()) == list(range(length))


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=2**33, max_value=2**62), seeds, st.data())
def test_places_in_huge_data_sets_are_in_range_and_distinct(length: int, seed: int, data: st.DataObject) -> None:
    """They are computed one by one, without a table."""
    places = data.draw(st.lists(st.integers(min_value=0, max_value=length - 1), min_size=2, max_size=20, unique=True))
    permutation = KeyedPermutation(length, seed, 0)
    samples = [permutation(place) for place in places]
    assert len(set(samples)) == len(places)
    assert all(0 <= sample < length for sample in samples)


def test_seed_and_epoch_determine_the_order() -> None:
    """A key gives the same order for ever, another key another order."""
    assert [KeyedPermutation(10, 17, 0)(k) for k in range(10)] == [KeyedPermutation(10, 17, 0)(k) for k in range(10)]
    orders = {tuple(KeyedPermutation(50, s, e)(k) for k in range(50)) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_the_order_is_part_of_the_format() -> None:
    """A recorded order never changes, so that a run restored by a later version goes on as it began."""
    assert [KeyedPermutation(10, 17, 3)(k) for k in range(10)] == PINNED


def test_places_and_lengths_out_of_range_are_refused() -> None:
    """A place past the epoch or an empty data set is an error, not a wrong sample."""
    with pytest.raises(ValueError, match="outside an epoch of 10"):
        KeyedPermutation(10, 0, 0)(10)
    with pytest.raises(ValueError, match="length from 1"):
        KeyedPermutation(0, 0, 0)


def test_adjacent_places_are_spread() -> None:
    """They map to adjacent samples no more often than by chance."""
    samples = KeyedPermutation(10_000, 1, 1).of(np.arange(10_000, dtype=np.uint64)).astype(np.int64)
    assert (np.abs(np.diff(samples)) == 1).sum() < 12
    assert abs(float(np.corrcoef(np.arange(10_000), samples)[0, 1])) < 0.05


PINNED = [8, 9, 3, 5, 4, 1, 6, 7, 2, 0]
