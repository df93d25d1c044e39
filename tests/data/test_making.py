"""Draws from global random numbers are noticed, whenever they come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from elastic3d.data.making import Drawn, Keyed, Undrawn, UndrawnBetween

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(1),
    "numpy": lambda: np.random.rand(),
    "numpy, as many as it makes at once": lambda: np.random.randint(0, 1 << 32, 624, dtype=np.uint32),
    "python": random.random,
    "seeds": random.seed,
}


@pytest.fixture(params=["MT19937", "PCG64"])
def generator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have numpy's global functions draw from a generator of this kind."""
    usual = np.random.mtrand.get_bit_generator()
    if request.param != "MT19937":
        np.random.mtrand.set_bit_generator(np.random.PCG64(1))
    yield
    np.random.mtrand.set_bit_generator(usual)


def beside() -> Undrawn:
    """Return what watches while the model may draw."""
    draws = Undrawn()
    draws.beside = True
    return draws


@pytest.mark.usefixtures("generator")
@pytest.mark.parametrize("made_before", [0, 1, 3])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
@pytest.mark.parametrize("kind", [UndrawnBetween, Undrawn, beside])
def test_a_draw_is_noticed_in_the_micro_batch_that_makes_it(
    kind: Callable[[], Undrawn | UndrawnBetween], draw: Callable[[], Any], made_before: int
) -> None:
    draws = kind()
    for _ in range(made_before):
        with draws.around():
            torch.ones(2) + 1
    with pytest.raises(Drawn), draws.around():
        draw()


@pytest.mark.parametrize("kind", [UndrawnBetween, Undrawn, beside])
def test_a_draw_is_noticed_where_the_data_set_catches_all_exceptions(
    kind: Callable[[], Undrawn | UndrawnBetween],
) -> None:
    with pytest.raises(Drawn), kind().around(), suppress(BaseException):
        torch.rand(1)


@pytest.mark.parametrize("kind", [UndrawnBetween, Undrawn, beside])
def test_a_generator_of_the_data_sets_own_is_no_draw(kind: Callable[[], Undrawn | UndrawnBetween]) -> None:
    draws, own = kind(), torch.Generator().manual_seed(1)
    for _ in range(3):
        with draws.around():
            torch.rand(1, generator=own)
            np.random.default_rng(1).random()
            random.Random(1).random()


def test_the_model_may_draw_meanwhile() -> None:
    """From torch's generator, in the thread that trains."""
    draws = beside()
    with draws.around():
        torch.default_generator.manual_seed(5)


def test_a_normal_number_that_numpy_has_kept_is_a_draw() -> None:
    """In the first micro-batch: numpy makes two at once, and the second of them moves nothing else."""
    np.random.seed(1)
    np.random.randn()
    with pytest.raises(Drawn), UndrawnBetween().around():
        np.random.randn()


@pytest.mark.usefixtures("generator")
def test_seeds_by_position_hold_for_any_generator_and_leave_it_as_it_was() -> None:
    keyed = Keyed(1, lent=True)
    before = [draw() for draw in (random.getstate, lambda: repr(np.random.get_state(legacy=False)))]
    drawn = []
    for position in (7, 8, 7):
        with keyed.around():
            keyed.before(position)
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[2] != drawn[1]
    assert before == [draw() for draw in (random.getstate, lambda: repr(np.random.get_state(legacy=False)))]
