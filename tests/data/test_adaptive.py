"""Sizes of the global batch that follow the gradient's noise: what is asked for, estimated and decided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic3d.data import Adaptive, Batches, Order
from elastic3d.data.noise import NoiseScale, StepSquares, decided, rate_factor
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.values import from_json, to_json

POLICY = Adaptive(64, 1024, every=10, measured_every=1, memory=5)


def known(scale: float, *, changed: int = 0, measured: int = 99) -> NoiseScale:
    return NoiseScale(variance=scale, gradient=1.0, measured=measured, changed=changed)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"minimum": 0}, "minimum is a whole number, 1 or more; it is 0"),
        ({"maximum": 64}, "minimum=64 is not below maximum=64; global_batch=64 is a batch that stays"),
        ({"maximum": 100}, "maximum=100 is no multiple of 64; maximum=128 is, and .* multiple=4 divides all three"),
        ({"start": 32}, "start=32 does not lie between minimum=64 and maximum=1024"),
        ({"multiple": 1}, "there are 961 sizes from 64 to 1024 by multiple=1, and 256 at most"),
        ({"multiple": True}, "multiple is a whole number, 1 or more; it is True"),
        ({"learning_rate": "cubic"}, 'learning_rate is one of "linear", "sqrt", "adascale", or None; it is \'cubic\''),
        ({"margin": 0.0}, "margin is a number above 0; it is 0.0"),
        ({"times": math.nan}, "times is a number above 0; it is nan"),
        ({"most": 1.0}, "most is a number above 1; it is 1.0"),
        ({"most": 1.5}, "most=1.5 allows no size after 64, as the next is 128; take most=2, or multiple= smaller than"),
        ({"most": 1.3, "minimum": 96, "multiple": 32}, "most=1.3 allows no size after 96, .*; take most=1.34, or"),
        ({"every": 2.5}, "every is a whole number, 1 or more; it is 2.5"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_said(given: dict[str, Any], message: str) -> None:
    """By name, with what would do."""
    with pytest.raises(UsageError, match=message):
        Adaptive(**{"minimum": 64, "maximum": 1024, **given})


@pytest.mark.parametrize(
    ("micro_batch", "leaf", "message"),
    [
        (5, 1, "micro_batch=5 is no divisor of Adaptive's multiple=64 and minimum=64"),
        (8, 3, "leaf=3 micro-batches of 8 is no divisor"),
        (64, 1, "noise shows only between two; minimum=128 would do"),
    ],
)
def test_sizes_are_whole_leaves_and_two_at_least(micro_batch: int, leaf: int, message: str) -> None:
    """One leaf by itself shows no noise."""
    with pytest.raises(ConfigurationError, match=message):
        Order(length=9, global_batch=320, micro_batch=micro_batch, seed=1, adaptive=POLICY).check_leaf(leaf)


def test_a_layout_must_fit_every_size_there_may_be() -> None:
    """The planner is given all of them, from the beginning."""
    order = Order(length=9, global_batch=128, micro_batch=8, seed=1, adaptive=replace_policy(maximum=256))
    assert order.counts == (8, 16, 24, 32)
    assert order.micro_batches == 8


def replace_policy(**values: Any) -> Adaptive:
    names = ("minimum", "maximum", "every", "memory", "learning_rate", "margin", "most", "times", "start", "multiple")
    return Adaptive(**{**{name: getattr(POLICY, name) for name in names}, **values})


def test_an_order_with_its_policy_reads_back() -> None:
    """From the facts of a checkpoint; those of an earlier release have none."""
    policy = replace_policy(learning_rate="sqrt", start=128)
    order = Order(length=9, global_batch=128, micro_batch=8, seed=1, adaptive=policy, changes=((7, 256),))
    assert from_json(Order, to_json(order)) == order
    noise = NoiseScale(variance=0.1, gradient=-1e-300, measured=3, changed=7, why="so")
    assert from_json(NoiseScale, to_json(noise)) == noise


def test_sizes_that_were_chosen_stay_and_the_script_chooses_the_next() -> None:
    """That of the next step is the state's too, if it was chosen; one that may be no more gives way at once."""
    order = Order(length=9, global_batch=64, micro_batch=8, seed=1, adaptive=POLICY)
    saved = replace(order, changes=((5, 128), (9, 256)))
    assert order.following(saved, 9).changes == ((5, 128), (9, 256))
    assert order.following(saved, 8).changes == ((5, 128),)
    less = replace(order, adaptive=replace_policy(maximum=192))
    assert less.following(saved, 12).changes == ((5, 128), (9, 256), (12, 192))
    assert less.following(saved, 9).changes == ((5, 128), (9, 192))
    fixed = Order(length=9, global_batch=64, micro_batch=8, seed=1, changes=((5, 128), (9, 256)))
    assert order.following(fixed, 9).changes == ((5, 128),)
    assert order.following(fixed, 10).changes == ((5, 128), (9, 256))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("leaves", "each", "spread", "length"), [(2, 1, 1.0, 1.0), (9, 3, 5.0, 0.5), (40, 2, 20.0, 3.0), (3, 5, 0.1, 4.0)]
)
def test_estimates_are_those_of_known_noise(leaves: int, each: int, spread: float, length: float, tokens: bool) -> None:
    """Of gradients drawn about a known one: their mean over many steps is what they were drawn with, in both kinds."""
    drawn = torch.Generator().manual_seed(leaves)
    width, steps = 200, 60
    true = torch.full((width,), length / math.sqrt(width), dtype=torch.float64)
    found = []
    for _ in range(steps):
        counts = torch.randint(1, 9, (leaves,), generator=drawn) if tokens else torch.full((leaves,), each)
        noise = torch.randn(leaves, width, generator=drawn, dtype=torch.float64) * math.sqrt(spread / width)
        means = true + noise / counts.sqrt().unsqueeze(1)
        whole = (means * counts.unsqueeze(1)).sum(0) / counts.sum()
        sums = means * counts.unsqueeze(1) if tokens else means / leaves
        step = StepSquares(
            samples=int(counts.sum()),
            leaves=sums.square().sum(1).tolist(),
            norm=float(whole.norm()),
            tokens=counts.double().tolist() if tokens else (),
        )
        one = step.estimates()
        assert one is not None
        found.append(one)
    variance = sum(one for one, _ in found) / steps
    gradient = sum(one for _, one in found) / steps
    size = leaves * each if not tokens else leaves * 4.5
    assert variance == pytest.approx(spread, rel=0.15)
    assert gradient == pytest.approx(
        length**2, rel=0.15, abs=4 * spread / size / math.sqrt(width * steps) + 1e-3 * spread
    )


def test_what_shows_nothing_changes_nothing() -> None:
    """A step of one leaf, one whose every gradient is zero, one that is not finite, and leaves without tokens."""
    for step in (
        StepSquares(samples=4, leaves=[1.0], norm=1.0),
        StepSquares(samples=4, leaves=[0.0, 0.0], norm=0.0),
        StepSquares(samples=4, leaves=[1.0, math.inf], norm=1.0),
        StepSquares(samples=4, leaves=[1.0, 0.0], norm=0.5, tokens=[3.0, 0.0]),
    ):
        assert step.estimates() is None
        assert NoiseScale(measured=3).after(step, 5) == NoiseScale(measured=3)


def test_the_average_forgets() -> None:
    """The mean of all at first, and then of the last ones, about."""
    noise = NoiseScale()
    for norm in [1.0] * 3 + [2.0] * 40:
        noise = noise.after(StepSquares(samples=2, leaves=[norm**2 / 4] * 2, norm=norm), 5)
    assert noise.measured == 43
    assert noise.gradient == pytest.approx(4.0 - 3.0 * 0.75 * 0.8**39)
    assert noise.variance == 0.0


@pytest.mark.parametrize(
    ("scale", "size", "chosen"),
    [
        (150.0, 128, None),  # within the margin
        (159.0, 128, None),
        (161.0, 128, 192),
        (103.0, 128, None),
        (102.0, 128, None),  # beyond it, but no other size is nearer
        (90.0, 128, 64),
        (700.0, 128, 256),  # at most by a factor of two
        (1.0, 1024, 512),
        (1.0, 64, None),
        (1e9, 1024, None),
        (1e9, 960, 1024),
        (1.0, 128, 64),
    ],
)
def test_sizes_follow_with_bounds_and_a_margin(scale: float, size: int, chosen: int | None) -> None:
    """To the nearest size, where that is another one and far enough."""
    change = decided(POLICY, known(scale), size, 100)
    assert (change.size if change else None) == chosen
    assert change is None or (change.step == 100 and f"the global batch is {chosen} after {size}" in change.why)


def test_nothing_changes_too_soon_or_too_often() -> None:
    """Not before enough was measured, nor before enough steps have been made since the last change."""
    assert decided(POLICY, known(500.0, measured=4), 64, 100) is None
    assert decided(POLICY, known(500.0, changed=91), 64, 100) is None
    assert decided(POLICY, known(500.0, changed=90), 64, 100) is not None
    assert decided(POLICY, NoiseScale(measured=9), 64, 100) is None


def test_a_gradient_lost_in_noise_asks_for_more() -> None:
    """As far as it may go at once."""
    change = decided(POLICY, NoiseScale(variance=1.0, gradient=-0.5, measured=9), 64, 100)
    assert change is not None
    assert (change.size, change.why) == (
        128,
        "the global batch is 128 after 64: the gradient is lost in its noise, and 128 as far as it may go at once",
    )


def test_learning_rates_follow_the_rule() -> None:
    """For `start` samples they are the script's; AdaScale's gain lies between one and the linear rule's factor."""
    noise = known(256.0)
    factors = {rule: rate_factor(replace_policy(learning_rate=rule), noise, 256) for rule in ("linear", "sqrt", None)}
    assert factors == {"linear": 4.0, "sqrt": 2.0, None: 1.0}
    gains = [rate_factor(replace_policy(learning_rate="adascale"), known(scale), 256) for scale in (0.0, 256.0, 1e12)]
    assert gains == [1.0, (256 / 64 + 1) / (256 / 256 + 1), pytest.approx(4.0)]
    assert rate_factor(replace_policy(learning_rate="adascale"), NoiseScale(), 256) == 1.0
    for rule in ("linear", "sqrt", "adascale"):
        assert rate_factor(replace_policy(learning_rate=rule), noise, 64) == 1.0


class Numbers:
    """Sample i is (i, i)."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([index]), torch.tensor(index)


class Stream:
    """The same, one after the other."""

    def __iter__(self) -> Any:
        return iter([Numbers()[index] for index in range(13)])


@pytest.mark.parametrize("dataset", [Numbers(), Stream()], ids=["numbered", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_loaded_ahead_is_loaded_anew(dataset: Any, workers: int) -> None:
    """Every position comes once, in order, whatever was under way when the size changed."""
    policy = Adaptive(4, 16, multiple=2)
    batches = Batches(dataset, global_batch=policy, micro_batch=2, seed=3, workers=workers)
    seen: list[int] = []
    for batch in batches.until(7):
        seen += [int(number) for part in batch.micro_batches for number in part.target]
        batches.step += 1
        if batch.step in (1, 2, 4, 6):
            batches.resize(batches.step, {1: 8, 2: 10, 4: 4, 6: 16}[batch.step])
    assert [batches.order.batch_at(step) for step in range(8)] == [4, 4, 8, 10, 10, 4, 4, 16]
    numbered = batches.order.samples(0, 44).tolist()
    assert seen == (numbered if isinstance(dataset, Numbers) else [number % 13 for number in numbered])
    assert batches.global_batch == 16


def test_a_data_set_that_grows_is_followed_from_where_sizes_that_were_chosen_have_come() -> None:
    """What was consumed stays as it was, and the new epoch begins at its first place."""
    policy = Adaptive(4, 16, every=1, multiple=4)
    saved = Order(length=100, global_batch=4, micro_batch=2, seed=1, adaptive=policy, changes=((2, 8), (4, 16)))
    assert saved.positions(6)[0] == 56
    grown = replace(saved, length=150, changes=()).following(saved, 6)
    assert grown.earlier == ((56, 100),)
    assert [*grown.samples(0, 56)] == [*saved.samples(0, 56)]
