"""Searching for garbage while a trainer begins: seldom, and as before once it has begun."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from elastic3d.training import Run, run_alone
from elastic3d.training.collecting import SELDOM, FewerCollections
from tests.parallel.models import Plain, Sentences


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_a_trainer_searches_seldom_until_it_has_its_state(thresholds: tuple[int, int, int]) -> None:
    """Its steps are made under the thresholds that the script began with."""
    seen = []

    def main(run: Run) -> None:
        seen.append(gc.get_threshold())
        model = run.shard(Plain)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=torch.optim.SGD(model.parameters()), batches=batches)
        seen.append(gc.get_threshold())

    run_alone(main)
    assert seen == [(SELDOM, *thresholds[1:]), thresholds]


@pytest.mark.parametrize("chosen", [(0, 5, 5), (SELDOM + 1, 5, 5)])
def test_a_script_that_has_chosen_has_its_way(chosen: tuple[int, int, int]) -> None:
    """Whether before the trainer began or since."""
    gc.set_threshold(*chosen)
    FewerCollections().end()
    assert gc.get_threshold() == chosen
    gc.set_threshold(700, 10, 10)
    begun = FewerCollections()
    gc.set_threshold(*chosen)
    begun.end()
    assert gc.get_threshold() == chosen
