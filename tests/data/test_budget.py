"""Micro-batches cut by a budget of tokens: pure functions of the lengths of a step's samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data import Adaptive, Batches, Growing, Mixture, Order, Share, Stratified, TokenBudget
from elastic3d.data.budget import cut
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.values import from_json, to_json

SIZES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]


class Texts:
    """Text i has as many tokens i as SIZES says."""

    lengths = SIZES

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((SIZES[index],), index), index


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True, padding_value=-1)
    return rows, torch.tensor([number for _, number in samples])


def made(budget: TokenBudget, *, global_batch: Any = 12, **more: Any) -> Batches:
    return Batches(Texts(), global_batch=global_batch, micro_batch=budget, seed=5, collate=padded, **more)


LENGTHS = st.lists(st.integers(0, 50), min_size=1, max_size=60)


@given(LENGTHS, st.integers(50, 200))
def test_every_sample_is_in_one_group_and_the_budget_is_kept(lengths: list[int], tokens: int) -> None:
    """Padded to its longest sample no group has more tokens than the budget, and the longest samples come first."""
    groups = cut(np.array(lengths), tokens)
    assert sorted(place for group in groups for place in group.tolist()) == list(range(len(lengths)))
    for group in groups:
        assert max(lengths[place] for place in group) * len(group) <= tokens
    flat = [lengths[place] for group in groups for place in group]
    assert flat == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 40))
def test_no_other_grouping_has_fewer_groups(lengths: list[int], tokens: int) -> None:
    """Compared with all ways of cutting the samples into groups."""

    def fewest(left: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> int:
        if not left:
            return len(groups)
        one, *rest = left
        options = [fewest(tuple(rest), (*groups, (one,)))]
        for number, group in enumerate(groups):
            grown = (*group, one)
            if max(grown) * len(grown) <= tokens:
                options.append(fewest(tuple(rest), (*groups[:number], grown, *groups[number + 1 :])))
        return min(options)

    assert len(cut(np.array(lengths), tokens)) == fewest(tuple(lengths), ())


@given(LENGTHS, st.integers(1, 60), st.integers(1, 7), st.randoms())
def test_the_number_of_groups_is_a_multiple_and_their_lengths_follow_no_order(
    lengths: list[int], tokens: int, multiple: int, chance: Any
) -> None:
    """Groups are cut in half where there are too few; the same samples in another order make groups of like lengths."""
    lengths = lengths * multiple
    groups = cut(np.array(lengths), tokens, multiple)
    assert len(groups) % multiple == 0
    assert sorted(place for group in groups for place in group.tolist()) == list(range(len(lengths)))
    assert all(len(group) == 1 or lengths[group[0]] * len(group) <= tokens for group in groups)
    other = chance.sample(lengths, len(lengths))
    assert [[lengths[place] for place in group] for group in groups] == [
        [other[place] for place in group] for group in cut(np.array(other), tokens, multiple)
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(9, 30), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_every_layout_runs_the_same_micro_batches(tokens: int, dp: int, multiple: int, leaf: int) -> None:
    """Each once, by one replica, whatever the number of replicas, leaves of micro-batches and steps without as many."""
    budget = TokenBudget(tokens, multiple=multiple * leaf)
    alone = made(budget).order
    seen: Counter[int] = Counter()
    for index in range(dp):
        batches = made(budget, share=Share(dp=dp, index=index, leaf=leaf))
        for batch in batches.until(step=4):
            assert batch.count == alone.micro_batches_at(batch.step)
            assert batch.sizes == alone.sizes_at(batch.step)
            for part in batch.micro_batches:
                assert part.target.tolist() == alone.micro_batch_samples(batch.step, part.like)
                assert part.input.numel() <= tokens
                if part.counts:
                    seen.update(part.target.tolist())
            batches.step += 1
    assert seen == Counter(alone.samples(0, 48).tolist())


@given(st.integers(9, 30), st.integers(1, 4))
def test_the_bounds_hold_for_every_step(tokens: int, multiple: int) -> None:
    """Layouts are proved for the numbers of micro-batches that are given as the fewest and the most."""
    order = made(TokenBudget(tokens, multiple=multiple), global_batch=Growing((0, 12), (3, 24))).order
    counts = [order.micro_batches_at(step) for step in range(12)]
    assert order.counts[0] <= min(counts)
    assert max(counts) <= order.counts[-1]
    assert order.micro_batches == counts[0]
    assert all(count % multiple == 0 for count in (*order.counts, *counts))


def test_a_step_has_the_samples_that_it_has_without_a_budget() -> None:
    """The budget groups them, and changes neither which they are nor their positions."""
    order, plain = made(TokenBudget(20)).order, Order(length=len(SIZES), global_batch=12, micro_batch=2, seed=5)
    for step in range(5):
        places = [one for index in range(order.micro_batches_at(step)) for one in order.micro_batch_places(step, index)]
        first, stop = plain.positions(step)
        assert sorted(places) == list(enumerate(plain.samples(first, stop).tolist(), start=first))


@pytest.mark.parametrize(
    "lengths",
    [SIZES, np.array(SIZES, dtype=np.uint16), SIZES.__getitem__, None],
    ids=("list", "array", "function", "own"),
)
def test_lengths_are_a_column_a_function_or_the_data_sets_own(lengths: Any) -> None:
    """The same micro-batches come of each."""
    order, alike = made(TokenBudget(20, lengths=lengths)).order, made(TokenBudget(20)).order
    assert [order.sizes_at(step) for step in range(4)] == [alike.sizes_at(step) for step in range(4)]


@pytest.mark.parametrize("lengths", [None, SIZES, SIZES.__getitem__], ids=("own", "list", "function"))
def test_lengths_follow_samples_that_are_numbered_anew(lengths: Any) -> None:
    """Of a stratified data set they are those of its own order, and of a mixture those of all sources."""
    stratified = Stratified(Texts(), labels=[number % 3 for number in range(len(SIZES))])
    mixture = Mixture({"a": Texts(), "b": Texts()}, weights={"a": 0.5, "b": 0.5})
    for dataset in (stratified, mixture):
        given = [*SIZES, *SIZES] if lengths == SIZES and dataset is mixture else lengths
        budget = TokenBudget(20, lengths=(lambda one: SIZES[one % 23]) if callable(given) else given)
        batches = Batches(dataset, global_batch=12, micro_batch=budget, seed=5, collate=padded)
        for batch in batches.until(step=3):
            for part in batch.micro_batches:
                sizes = [SIZES[number] for number in part.target.tolist()]
                assert part.input.shape == (len(sizes), max(sizes))
                assert part.input.numel() <= 20
                assert sizes == sorted(sizes, reverse=True)
            batches.step += 1


def test_no_sample_is_loaded_to_cut_a_step() -> None:
    """A rank knows of all micro-batches from the column alone."""

    class Unread(Texts):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("loaded")

    batches = Batches(Unread(), global_batch=12, micro_batch=TokenBudget(20), seed=1, collate=padded)
    assert sum(batches.order.sizes_at(7)) == 12


def test_mean_losses_are_weighed_by_samples() -> None:
    """What micro-batches are divided by makes a whole of them, without those that are left out."""
    batches = made(TokenBudget(20))
    batch = next(batches.until(step=1))
    assert len({*batch.sizes}) > 1
    shares = [1 / batch.divisor(part) for part in batch.micro_batches]
    assert shares == pytest.approx([size / 12 for size in batch.sizes])
    batches.exclude(0, [0])
    left = batches.counted_anew(batch)
    assert sum(1 / left.divisor(part) for part in left.micro_batches if part.counts) == pytest.approx(1)
    assert (left.samples, left.excluded_samples) == (12 - batch.sizes[0], batch.sizes[0])


def test_micro_batches_are_left_out_as_wholes() -> None:
    """Their positions lie apart, and holes that cut one are refused with those that would do."""
    order = made(TokenBudget(20)).order
    holes = order.positions_of(2, [1])
    assert sum(stop - first for first, stop in holes) == order.sizes_at(2)[1]
    assert made(TokenBudget(20), exclude=holes).order.excluded(2) == (1,)
    part = (holes[0][0], holes[0][0] + 1)
    with pytest.raises(UsageError, match="which are left out as wholes") as refused:
        made(TokenBudget(20), exclude=[part])
    assert str(list(holes)) in str(refused.value)


def test_workers_load_the_same_micro_batches() -> None:
    """In processes ahead of the steps, of which each has another number of micro-batches."""
    one, other = made(TokenBudget(12)), made(TokenBudget(12), workers=2)
    numbers = set()
    for here, there in zip(one.until(step=4), other.until(step=4), strict=True):
        for a, b in zip(here.micro_batches, there.micro_batches, strict=True):
            assert torch.equal(a.input, b.input)
        assert here.sample_sum == there.sample_sum
        numbers.add(here.count)
        one.step += 1
        other.step += 1
    assert len(numbers) > 1


class FetchedTexts:
    """Texts that are fetched ahead. told: what was told of each time; asked: how often each length was wanted."""

    ahead = 64

    def __init__(self) -> None:
        self.told: list[Sequence[int]] = []
        self.asked: Counter[int] = Counter()

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([number]), torch.tensor([number])

    def lengths(self, number: int) -> int:
        self.asked[number] += 1
        return 4 + number % 5

    def prefetch(self, numbers: Sequence[int]) -> None:
        self.told.append(numbers)


def test_looking_ahead_cuts_no_step_twice() -> None:
    """Though steps are so short that those that are fetched belong to several."""
    texts = FetchedTexts()
    batches = Batches(texts, global_batch=12, micro_batch=TokenBudget(64), seed=11)
    for _ in batches.until(step=24):
        assert batches.tokens(batches.step, ()) >= 4 * 12
        batches.step += 1
    assert max(map(len, texts.told)) == texts.ahead
    assert set(texts.asked.values()) == {1}


def test_the_order_of_a_state_has_the_budget_without_the_lengths() -> None:
    """It says by a digest which lengths they were; nodes with other ones run another job."""
    order = made(TokenBudget(20)).order
    plain = to_json(order)
    assert from_json(Order, plain) == order
    assert plain["budget"] == {
        "tokens": 20,
        "multiple": 1,
        "alone": False,
        "shortest": 1,
        "longest": 9,
        "digest": order.budget.digest if order.budget else "",
    }
    assert repr(order) != repr(made(TokenBudget(20, lengths=[*SIZES[:-1], 7])).order)


def test_tokens_of_a_step_are_those_of_its_texts() -> None:
    """Fillers do not count, and neither does what is left out."""
    batches = made(TokenBudget(20))
    whole = sum(SIZES[sample] for sample in batches.order.samples(0, 12).tolist())
    first = sum(SIZES[sample] for sample in batches.order.micro_batch_samples(0, 0))
    assert (batches.tokens(0, ()), batches.tokens(0, (0,))) == (whole, whole - first)


def test_a_text_longer_than_the_budget_is_refused_or_alone() -> None:
    """By its number, before any step where lengths are a column, and in its step where they are a function."""
    with pytest.raises(UsageError, match="sample 5 of the data set has 9 tokens, more than the budget of 8"):
        made(TokenBudget(8))
    late = made(TokenBudget(8, lengths=SIZES.__getitem__))
    with pytest.raises(UsageError, match=r"has 9 tokens, more than the budget of 8"):
        late.order.micro_batches_at(0)
    order = made(TokenBudget(8, too_long="alone")).order
    for step in range(4):
        for index in range(order.micro_batches_at(step)):
            sizes = [SIZES[sample] for sample in order.micro_batch_samples(step, index)]
            assert len(sizes) == 1 or max(sizes) * len(sizes) <= 8


@pytest.mark.parametrize(
    ("why", "make"),
    [
        ("tokens is a whole number", lambda: TokenBudget(0)),
        ("multiple is a whole number", lambda: TokenBudget(8, multiple=True)),
        ("too_long must be one of refuse, alone", lambda: TokenBudget(8, too_long="cut")),
        ("one whole number for each of 23 samples", lambda: made(TokenBudget(9, lengths=[1, 2]))),
        ("array of float64", lambda: made(TokenBudget(9, lengths=cast(Any, [1.5] * 23)))),
        ("sample 1 was given a length of -2", lambda: made(TokenBudget(9, lengths=[1, -2, *SIZES[2:]]))),
        ("gave 'x' for sample", lambda: made(TokenBudget(9, lengths=cast(Any, lambda _: "x"))).order.micro_batches),
        ("list has no `lengths`", lambda: Batches([1], global_batch=1, micro_batch=TokenBudget(9), seed=0)),
        ("does not go with global_batch=Adaptive", lambda: made(TokenBudget(9), global_batch=Adaptive(4, 8))),
        ("one_shape=True says", lambda: made(TokenBudget(9), one_shape=True)),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(why: str, make: Callable[[], Any]) -> None:
    """With what would do."""
    with pytest.raises(UsageError, match=why):
        make()


def test_a_stream_is_refused() -> None:
    """Nobody knows how long its samples will be."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with pytest.raises(UsageError, match="a stream does not say how long"):
        Batches(Stream(), global_batch=4, micro_batch=TokenBudget(9), seed=0)


def test_numbers_that_do_not_go_together_are_refused_with_those_that_do() -> None:
    """multiple divides the global batch, and leaves divide multiple."""
    with pytest.raises(ConfigurationError, match=r"global_batch=15 would do"):
        made(TokenBudget(9, multiple=5))
    with pytest.raises(ConfigurationError, match=r"TokenBudget\(multiple=4\) would do"):
        made(TokenBudget(9, multiple=3), share=Share(leaf=2))
