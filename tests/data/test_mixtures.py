"""Mixtures of sources: shares of each step, epochs of each source, and what is no mixture."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data import Batches, Growing, Mixture, Order, Stratified, check, mixing
from elastic3d.data.apportionment import floor_sum, golden_step
from elastic3d.data.proportions import MixedSource, Proportions, WeightStage
from elastic3d.errors import StateError, UsageError
from elastic3d.training import state_facts
from elastic3d.training.state_facts import StateFacts
from elastic3d.values import from_json, to_json
from tests.data.mixing import Numbers, trained

THREE = ("web", "code", "math")

stages = st.lists(
    st.tuples(st.integers(1, 15), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)), max_size=4
).map(
    lambda given: (
        WeightStage(step=0, weights=(5, 3, 2)),
        *(
            WeightStage(step=sum(gap for gap, _ in given[: number + 1]), weights=tuple(weights))
            for number, (_, weights) in enumerate(given)
        ),
    )
)
proportions = st.builds(
    lambda stages, linear, lengths: Proportions(
        sources=tuple(MixedSource(name=name, length=length) for name, length in zip(THREE, lengths, strict=True)),
        stages=stages,
        linear=linear,
    ),
    stages,
    st.booleans(),
    st.tuples(*[st.integers(1, 25)] * 3),
)
batches = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=3).map(
    lambda given: tuple(
        (sum(gap for gap, _ in given[1 : number + 1]), batch) for number, (_, batch) in enumerate(given)
    )
)
Parts = tuple[tuple[int, int], ...]


@given(st.integers(0, 40), st.integers(1, 50), st.integers(-99, 99), st.integers(-99, 99))
def test_the_closed_form_is_the_sum(count: int, divisor: int, factor: int, start: int) -> None:
    """Of rounded linear functions that rise or fall."""
    assert floor_sum(count, divisor, factor, start) == sum((factor * i + start) // divisor for i in range(count))


@given(st.integers(1, 300))
def test_a_golden_walk_visits_every_place_once(places: int) -> None:
    """And neighbours in time are far apart, where there is room."""
    visited = [number * golden_step(places) % places for number in range(places)]
    assert sorted(visited) == list(range(places))
    assert places < 8 or all(abs(one - other) > 1 for one, other in pairwise(visited))


@settings(max_examples=100, deadline=None)
@given(proportions, batches, st.integers(0, 2**64))
def test_each_step_has_every_share_rounded_down_or_up(mixed: Proportions, parts: Parts, seed: int) -> None:
    """Whatever the weights and batches do; and what was consumed before a step is the sum of all steps before it."""
    total = (0, 0, 0)
    for step in range(60):
        counts = mixing.counts(mixed, parts, seed, step)
        assert mixing.consumed(mixed, parts, seed, step) == total
        size = Order(length=9, global_batch=parts[0][1], micro_batch=1, seed=0, changes=parts[1:]).batch_at(step)
        assert sum(counts) == size
        for count, weight in zip(counts, mixed.at(step), strict=True):
            assert floor(size * weight) <= count <= ceil(size * weight)
        total = tuple(old + new for old, new in zip(total, counts, strict=True))  # type: ignore[assignment]


@settings(max_examples=60, deadline=None)
@given(proportions, batches, st.integers(0, 2**64), st.integers(0, 300), st.integers(0, 300))
def test_each_source_has_its_own_epochs(mixed: Proportions, parts: Parts, seed: int, one: int, other: int) -> None:
    """Each of its samples comes once before any comes again; and a sample is found from its position alone."""
    order = Order(
        length=mixed.length, global_batch=parts[0][1], micro_batch=1, seed=seed, changes=parts[1:], proportions=mixed
    )
    every, (first, stop) = order.samples(0, 300).tolist(), sorted((one, other))
    assert order.samples(first, stop).tolist() == every[first:stop]
    start = 0
    for source in mixed.sources:
        own = [sample for sample in every if start <= sample < start + source.length]
        start += source.length
        for epoch in range(0, len(own), source.length):
            assert max(Counter(own[epoch : epoch + source.length]).values()) == 1


@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(1, 40),
    st.integers(0, 2**64),
    st.integers(0, 10**9),
)
def test_totals_are_exact_after_each_period(weights: list[int], batch: int, seed: int, periods: int) -> None:
    """While weights stay there is no drift, however far the run is: and far steps cost no more than near ones."""
    mixed = proportions_of((0, weights))
    period = sum(weights)
    assert mixing.consumed(mixed, ((0, batch),), seed, periods * period) == tuple(
        batch * weight * periods for weight in weights
    )


@pytest.mark.parametrize("steps", [300, 828, 1341, 5000])
@pytest.mark.parametrize("to", [(1, 9, 0), (0, 10, 0), (8, 1, 1)])
def test_totals_on_a_slope_stay_near_the_sum_of_the_shares(steps: int, to: tuple[int, ...]) -> None:
    """Within ten samples, also where a slope and the turns of the rounding would go together."""
    mixed = proportions_of((0, (9, 1, 0)), (steps, to), linear=True)
    shares = [Fraction(0)] * 3
    for step in range(steps):
        if not step % 50:
            counts = mixing.consumed(mixed, ((0, 512),), 7, step)
            assert max(abs(count - share) for count, share in zip(counts, shares, strict=True)) < 10
        shares = [share + 512 * weight for share, weight in zip(shares, mixed.at(step), strict=True)]


def proportions_of(*pairs: tuple[int, Any], linear: bool = False) -> Proportions:
    return Proportions(
        sources=tuple(MixedSource(name=name, length=100) for name in THREE),
        stages=tuple(WeightStage(step=step, weights=tuple(weights)) for step, weights in pairs),
        linear=linear,
    )


WEIGHTS = [(0, {"web": 0.7, "code": 0.3}), (4, {"web": 0.25, "code": 0.25, "math": 0.5})]


def mixture() -> Mixture:
    return Mixture(
        {"web": Numbers(30), "code": Numbers(11, 100), "math": Numbers(7, 200)}, weights=WEIGHTS, linear=True
    )


@pytest.mark.parametrize(("dp", "micro_batch"), [(1, 1), (1, 6), (2, 2), (3, 3), (4, 1), (5, 6)])
def test_batches_do_not_depend_on_the_layout(dp: int, micro_batch: int) -> None:
    """The same samples in the same order for any dp and micro-batch, and from any step; the ledger proves them."""
    size = Growing((0, 6), (3, 12))
    whole, ledger = trained(mixture, dp=1, global_batch=size, micro_batch=6, steps=range(11))
    assert trained(mixture, dp=dp, global_batch=size, micro_batch=micro_batch, steps=range(11))[0] == whole
    resumed, rest = trained(mixture, dp=dp, global_batch=size, micro_batch=micro_batch, steps=range(7, 11))
    assert resumed == whole[7:]
    order = Batches(mixture(), global_batch=size, micro_batch=micro_batch, seed=5).order
    assert check(ledger, order).whole
    assert check((*trained(mixture, dp=1, global_batch=size, micro_batch=6, steps=range(7))[1], *rest), order).whole
    other = replace(order, proportions=replace(mixture().proportions, linear=False))
    assert check(ledger, other).wrong


def test_sources_are_spread_over_the_micro_batches() -> None:
    """No micro-batch is of one source alone."""
    data = Mixture({"a": Numbers(100), "b": Numbers(100, 100)}, weights={"a": 0.5, "b": 0.5})
    order = Batches(data, global_batch=64, micro_batch=8, seed=3).order
    for step in range(15):
        for index in range(8):
            assert 2 <= sum(sample < 100 for sample in order.micro_batch_samples(step, index)) <= 6


def test_weights_are_read_as_fractions() -> None:
    """A third is a third, and not what a float makes of it; weights without one that is short are near it."""
    thirds = Mixture({"a": Numbers(1), "b": Numbers(1)}, weights={"a": 1 / 3, "b": 2 / 3}).proportions
    assert thirds.stages == (WeightStage(step=0, weights=(1, 2)),)
    odd = {name: value / 71.0 for name, value in zip("abc", (10.00001, 30.0000003, 30.9999897), strict=True)}
    weights = Mixture({name: Numbers(1) for name in odd}, weights=odd).proportions.at(0)
    assert sum(weights) == 1
    assert all(abs(weight - odd[name]) < 1e-6 for name, weight in zip(odd, weights, strict=True))


def test_the_order_is_part_of_the_format() -> None:
    """A recorded order never changes, so that a run restored by a later version goes on as it began."""
    order = Batches(mixture(), global_batch=6, micro_batch=6, seed=17).order
    assert order.samples(10, 30).tolist() == PINNED
    assert from_json(Order, to_json(order)) == order
    slope = proportions_of((0, (9, 1, 0)), (1341, (1, 9, 0)), linear=True)
    assert mixing.consumed(slope, ((0, 512),), 7, 1000) == PINNED_COUNTS


def test_samples_are_named_by_their_source() -> None:
    """An error is about a sample as people know it."""
    data = mixture()
    assert len(data) == 48
    assert data.name_of(30) == "sample 0 of the data set (source 'code')"
    assert [int(data[number][0]) for number in (0, 29, 30, 40, 41, 47)] == [0, 29, 100, 110, 200, 206]
    with pytest.raises(IndexError):
        data[48]


def facts(step: int, mixed: Mixture | None, **more: Any) -> StateFacts:
    return StateFacts(step=step, order=order_of(mixed, **more), ledger=(), optimizer_groups=(), schedule=None)


def order_of(mixed: Any, global_batch: Any = 6) -> Order:
    return Batches(mixed or Numbers(48), global_batch=global_batch, micro_batch=2, seed=1).order


def mixed(weights: Any, lengths: dict[str, int] | None = None, *, linear: bool = False) -> Mixture:
    sources = {name: Numbers(length) for name, length in (lengths or {"web": 30, "code": 18}).items()}
    return Mixture(sources, weights=weights, linear=linear)


OLD = {"web": 0.75, "code": 0.25}
NEW = {"web": 0.5, "code": 0.5}


def test_weights_may_change_from_the_present_step_on() -> None:
    """As a further stage, which the state keeps from then on; it is said what changes."""
    saved = facts(100, mixed(OLD))
    assert state_facts.check_facts(saved, 100, order_of(mixed(OLD))) == ""
    said = state_facts.check_facts(saved, 100, order_of(mixed([(0, OLD), (100, NEW)])))
    assert said == "from step 100 on web 0.5, code 0.5"
    said = state_facts.check_facts(saved, 100, order_of(mixed([(0, OLD), (100, OLD), (200, NEW)], linear=False)))
    assert said == "from step 100 on web 0.75, code 0.25; from step 200 on web 0.5, code 0.5"
    for weights in (NEW, [(0, OLD), (99, NEW)], [(0, OLD), (50, OLD)]):
        with pytest.raises(StateError, match=r"as weights=\[\(0, ...\), \(100, ...\)\], or start a new run"):
            state_facts.check_facts(saved, 100, order_of(mixed(weights)))


def test_a_slope_may_be_left_at_the_weights_it_has_reached() -> None:
    """Another one from the start would be another past."""
    saved = facts(50, mixed([(0, OLD), (100, NEW)], linear=True))
    reached = {"web": 0.625, "code": 0.375}
    said = state_facts.check_facts(saved, 50, order_of(mixed([(0, OLD), (50, reached)], linear=True)))
    assert said == "from step 50 on web 0.625, code 0.375"
    with pytest.raises(StateError, match="another slope"):
        state_facts.check_facts(saved, 50, order_of(mixed([(0, OLD), (80, NEW)], linear=True)))


def test_sources_may_be_added_behind_the_old_ones() -> None:
    """Their weight is 0 up to the present step; the old ones stay as they are."""
    saved = facts(100, mixed(OLD))
    more = mixed([(0, OLD), (100, {"web": 0.5, "code": 0.25, "math": 0.25})], {"web": 30, "code": 18, "math": 5})
    said = state_facts.check_facts(saved, 100, order_of(more))
    assert said == "added math; from step 100 on web 0.5, code 0.25, math 0.25"
    for step in (0, 50, 99):
        before, after = (order.samples(*order.positions(step)) for order in (saved.order, order_of(more)))
        assert before.tolist() == after.tolist()
    for lengths in ({"web": 30}, {"code": 18, "web": 30}, {"web": 31, "code": 18}):
        weights = {name: OLD.get(name, 0) if len(lengths) > 1 else 1 for name in lengths}
        with pytest.raises(StateError, match="Sources can be added behind the old ones"):
            state_facts.check_facts(saved, 100, order_of(mixed(weights, lengths)))


def test_other_contents_of_a_source_are_refused() -> None:
    """By its fingerprint, where both have one."""

    def of(fingerprint: str) -> Mixture:
        return Mixture({"web": Numbers(3, fingerprint=fingerprint), "code": Numbers(3)}, weights=OLD)

    saved = facts(9, of("old.bin"))
    for trusted in ("old.bin", ""):
        state_facts.check_facts(saved, 9, order_of(of(trusted)))
    with pytest.raises(StateError, match=r"the source 'web' of 3 samples and the contents old.bin .* new.bin"):
        state_facts.check_facts(saved, 9, order_of(of("new.bin")))


def test_a_mixture_is_no_other_data_set() -> None:
    """Even if it is as long."""
    with pytest.raises(
        StateError, match=r"a mixture of web, code and run.batches now has a data set that is no mixture"
    ):
        state_facts.check_facts(facts(9, mixed(OLD)), 9, order_of(None))
    with pytest.raises(StateError, match=r"a data set that is no mixture and run.batches now has a mixture"):
        state_facts.check_facts(facts(9, None), 9, order_of(mixed(OLD)))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 0.5, "b": 0.4}, "must sum to one, and sum to 0.9; divide"),
        ({"a": 70, "b": 30}, "sum to 100; divide"),
        ({"a": 1.5, "b": -0.5}, "numbers from 0 to 1; that of 'b' is -0.5"),
        ({"a": float("nan"), "b": 1.0}, "that of 'a' is nan"),
        ({"a": float("inf"), "b": 1.0}, "that of 'a' is inf"),
        ({"a": "0.5", "b": 0.5}, "that of 'a' is '0.5'"),
        ({"a": True, "b": 0.0}, "that of 'a' is True"),
        ({"a": 1.0, "c": 0.0}, "name 'c', which is no source; the sources are a, b"),
        ({"a": 1.0, "b": 0.0}, "source 'b' has no weight in any step"),
        ({"a": 1 - 1e-9, "b": 1e-9}, "less than one sample in a million"),
        ({}, "sum to 0"),
        ([], "begin with step 0"),
        ([(5, {"a": 0.5, "b": 0.5})], "begin with step 0"),
        ([(0, {"a": 0.5, "b": 0.5}), (0, {"a": 0.5, "b": 0.5})], "rise"),
        ([(0, {"a": 0.5, "b": 0.5}), (9.5, {"a": 1})], "a list of .from step, dict.; .9.5,"),
        ([0.5, 0.5], "is neither"),
        (0.5, "is neither"),
        (None, "is neither"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, says: str) -> None:
    """When the mixture is made, with what would do."""
    with pytest.raises(UsageError, match=says):
        Mixture({"a": Numbers(2), "b": Numbers(2)}, weights=weights)


class Stream:
    """No map-style data set."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({}, "data sets by name"),
        ([Numbers(2)], "data sets by name, .* not list"),
        ({"": Numbers(2)}, "called by a name, not ''"),
        ({1: Numbers(2)}, "called by a name, not 1"),
        ({"a": Numbers(0)}, "source 'a' is empty"),
        ({"a": Stream()}, "source 'a' must be a map-style data set"),
        ({"a": Stratified(Numbers(2), labels=[1, 1])}, "source 'a' is a Stratified, whose order would be lost"),
    ],
)
def test_what_is_no_source_is_refused(sources: Any, says: str) -> None:
    """Empty ones and streams too."""
    with pytest.raises(UsageError, match=says):
        Mixture(sources, weights={"a": 1})


PINNED = [38, 10, 15, 44, 39, 37, 14, 1, 0, 21, 46, 47, 30, 34, 43, 42, 45, 31, 32, 18]
PINNED_COUNTS = (308231, 203769, 0)
