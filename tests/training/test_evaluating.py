"""The micro-batches that an evaluation is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from elastic3d.data.collating import Collating
from elastic3d.data.making import UndrawnBetween
from elastic3d.errors import UsageError
from elastic3d.training.evaluating import TRIES, made_of

Samples = list[tuple[torch.Tensor, torch.Tensor]]


class Beside(Samples):
    """A data set, and a thread that draws while the first `times` micro-batches are made of it."""

    def __init__(self, times: int) -> None:
        super().__init__([(torch.tensor(float(number)), torch.tensor(number)) for number in range(4)])
        self.times = times

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if index == 0 and self.times:
            self.times -= 1
            random.random()
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    """Have the next test draw what it would have drawn."""
    state = random.getstate()
    yield
    random.setstate(state)


def test_what_another_thread_draws_is_not_held_against_the_data_set() -> None:
    ((inputs, targets),) = made_of(Beside(TRIES - 1), [0], 2, Collating(None), UndrawnBetween())
    assert (inputs.tolist(), targets.tolist()) == ([0.0, 1.0], [0, 1])


def test_a_data_set_that_draws_each_time_is_refused() -> None:
    with pytest.raises(UsageError, match="draws from the global random numbers"):
        made_of(Beside(1 << 30), [0], 2, Collating(None), UndrawnBetween())
