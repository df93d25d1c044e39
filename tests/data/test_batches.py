from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from elastic3d.data import Batches, Order, Share
from elastic3d.data.micro_batches import PASSED_OVER
from elastic3d.errors import ConfigurationError, UsageError


def numbered(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length), torch.arange(length) * 10)


def consumed(dp: int, steps: int, length: int = 23, global_batch: int = 10, micro_batch: int = 2) -> list[list[int]]:
    """Return the counted samples by step, over all dp ranks."""
    by_step: list[list[int]] = [[] for _ in range(steps)]
    for index in range(dp):
        batches = Batches(
            numbered(length),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=5,
            share=Share(dp=dp, index=index),
        )
        for batch in batches.until(step=steps):
            for part in batch.micro_batches:
                assert torch.equal(part.target, part.input * 10)
                if part.counts:
                    by_step[batch.step] += part.input.tolist()
            batches.step += 1
    return by_step


def test_each_step_consumes_the_same_positions_under_any_dp() -> None:
    """The multiset of samples of every step is the same for any number of replicas, even if it does not divide."""
    reference = [sorted(step) for step in consumed(1, steps=7)]
    for dp in (2, 3, 4, 5, 7):
        assert [sorted(step) for step in consumed(dp, steps=7)] == reference


def test_every_sample_comes_once_per_epoch_across_step_boundaries() -> None:
    """Epochs need not end at a step: after n * k samples each was consumed k times."""
    flat = [sample for step in consumed(2, steps=23) for sample in step]
    assert Counter(flat) == dict.fromkeys(range(23), 10)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_run_beyond_a_step_may_change_while_steps_are_loaded_ahead(workers: int) -> None:
    """What was loaded already for the steps to come is loaded anew, and each step has what is asked for it now."""
    more: dict[int, list[int]] = {}
    share = Share(extra=lambda step, count: [count * PASSED_OVER + index for index in more.get(step, [])])
    batches = Batches(numbered(40), global_batch=4, micro_batch=2, seed=1, share=share, workers=workers)
    seen = []
    for batch in batches.until(step=6):
        seen.append([part.index for part in batch.micro_batches])
        if batch.step == 2:
            more |= {3: [1], 5: [0, 1]}
            batches.load_anew()
        batches.step += 1
    repeated = [2 * PASSED_OVER, 2 * PASSED_OVER + 1]
    assert [part[2:] for part in seen] == [[], [], [], repeated[1:], [], repeated]


def test_the_step_is_the_whole_state_of_the_iteration() -> None:
    """A fresh iteration from step 3 yields exactly what the first one would have."""
    first = Batches(numbered(40), global_batch=4, micro_batch=2, seed=1)
    seen = []
    for batch in first.until(step=6):
        seen.append([part.input.tolist() for part in batch.micro_batches])
        first.step += 1
    again = Batches(numbered(40), global_batch=4, micro_batch=2, seed=1)
    again.step = 3
    for batch in again.until(step=6):
        assert [part.input.tolist() for part in batch.micro_batches] == seen[batch.step]
        again.step += 1
    assert list(again.until(step=6)) == []


def test_workers_give_the_same_batches() -> None:
    """Loading in processes changes neither the samples nor the random numbers of the model."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    plain = Batches(numbered(30), global_batch=6, micro_batch=3, seed=2)
    working = Batches(numbered(30), global_batch=6, micro_batch=3, seed=2, workers=1)
    for one, other in zip(plain.until(step=3), working.until(step=3), strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(a.input, b.input)
        assert (one.samples, one.sample_sum) == (other.samples, other.sample_sum)
        plain.step += 1
        working.step += 1
    assert torch.equal(before, torch.get_rng_state())


def test_middle_stages_load_nothing() -> None:
    """A stage that needs neither input nor target never touches the data set."""

    class Untouchable:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> None:
            raise AssertionError("loaded")

    batches = Batches(Untouchable(), global_batch=4, micro_batch=2, seed=0, share=Share(inputs=False, targets=False))
    batch = next(batches.until(step=1))
    assert [part.input for part in batch.micro_batches] == [None, None]
    assert batch.samples == 0


def test_a_batch_that_was_not_stepped_is_an_error() -> None:
    """Without run.step the loop would train on one batch for ever."""
    batches = Batches(numbered(10), global_batch=2, micro_batch=2, seed=0)
    with pytest.raises(UsageError, match=r"run.step was not called"):
        list(batches.until(step=2))


def test_wrong_micro_batch_sizes_are_refused_with_valid_ones() -> None:
    """The message names sizes that work."""
    with pytest.raises(ConfigurationError, match="micro_batch=3 or global_batch=12 would"):
        Order(length=10, global_batch=9, micro_batch=4, seed=0)
    with pytest.raises(UsageError, match="empty"):
        Order(length=0, global_batch=8, micro_batch=4, seed=0)
    with pytest.raises(UsageError, match="must be 1 or more"):
        Order(length=10, global_batch=8, micro_batch=0, seed=0)


def test_samples_that_are_not_pairs_are_refused() -> None:
    """At the first batch, by name: a data set has to give (input, target)."""
    triples = TensorDataset(torch.arange(8), torch.arange(8), torch.arange(8))
    with pytest.raises(UsageError, match=r"pair \(input, target\)"):
        Batches(triples, global_batch=2, micro_batch=2, seed=0).example()
    with pytest.raises(UsageError, match="map-style"):
        Batches(7, global_batch=2, micro_batch=2, seed=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="can be read only once"):
        Batches(iter([1]), global_batch=2, micro_batch=2, seed=0)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_keyed_sums_of_parts_add_up(length: int, first: int, middle: int, stop: int) -> None:
    """Splitting the positions anywhere leaves the keyed sum as it is."""
    first, middle, stop = sorted((first, middle, stop))
    order = Order(length=length, global_batch=4, micro_batch=2, seed=9)
    parts = order.sum_of_positions(first, middle) + order.sum_of_positions(middle, stop)
    assert parts % (1 << 40) == order.sum_of_positions(first, stop)


@pytest.mark.parametrize("name", ["global_batch", "micro_batch", "seed"])
@pytest.mark.parametrize("value", [4.0, np.int64(4), "4", True, None])
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    """A state would be saved with it, and could not be read."""
    given: Any = {"global_batch": 4, "micro_batch": 2, "seed": 1, name: value}
    with pytest.raises(UsageError, match=rf"{name}={re.escape(repr(value))} is no whole number; give it as an int"):
        Batches(numbered(10), **given)


def test_a_step_to_iterate_to_is_a_whole_number() -> None:
    """A float of the same value would end in an error of Python's own, far from the call."""
    batches = Batches(numbered(10), global_batch=4, micro_batch=2, seed=1)
    with pytest.raises(UsageError, match=r"batches.until: step=20000.0 is no whole number"):
        next(batches.until(step=2e4))  # type: ignore[arg-type]
