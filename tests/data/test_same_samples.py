"""Nodes whose data sets make other samples are told apart by their first micro-batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from elastic3d.data import Batches


class Listed(torch.utils.data.Dataset[Any]):
    """Samples of files, in the order in which a machine lists them. draw: what is added to each."""

    def __init__(self, files: list[int], draw: Any = lambda: 0.0) -> None:
        self.files, self.draw = files, draw

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.files[index]
        return {"x": torch.tensor([number + self.draw()]), "path": f"/disk{id(self)}/{number}", "labels": number}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("nothing is read for this")


def digest(dataset: Any) -> str:
    return Batches(dataset, global_batch=4, micro_batch=2, seed=5).samples


SORTED = list(range(40))


def test_files_that_are_listed_in_another_order_are_other_samples() -> None:
    shuffled = random.Random(1).sample(SORTED, 40)
    assert digest(Listed(SORTED)) == digest(Listed(SORTED)) != digest(Listed(shuffled))


def test_samples_that_are_drawn_by_position_are_the_same_everywhere() -> None:
    """Of the same draws, and the generators stay as they were."""
    before = random.getstate()
    assert digest(Listed(SORTED, random.random)) == digest(Listed(SORTED, random.random)) != digest(Listed(SORTED))
    assert random.getstate() == before


def test_samples_that_are_others_each_time_and_streams_are_taken_on_trust() -> None:
    assert digest(Listed(SORTED, np.random.default_rng().random)) == ""
    assert digest(Stream()) == ""


def test_samples_that_are_flipped_now_and_then_are_seldom_taken_for_the_same_each_time() -> None:
    """Of a hundred runs, where a sample is another one half the time: (1/4) ** 3 of micro-batches of two."""
    own = random.Random(1)
    assert sum(digest(Listed(SORTED, lambda: float(own.random() < 0.5))) != "" for _ in range(100)) <= 5


def test_further_samples_tell_data_sets_apart_from_draws() -> None:
    """Those that are drawn have no digest there, and those of other files are others in every place."""

    def later(dataset: Any) -> list[str]:
        return Batches(dataset, global_batch=4, micro_batch=2, seed=5).later_samples()

    one, other = later(Listed(SORTED)), later(Listed(random.Random(1).sample(SORTED, 40)))
    assert one == later(Listed(SORTED))
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert set(later(Listed(SORTED, np.random.default_rng().random))) == {""}


def test_tensors_of_every_type_have_a_digest() -> None:
    samples = [
        (torch.tensor(number, dtype=dtype), torch.zeros(()))
        for dtype in (torch.bfloat16, torch.bool, torch.complex64)
        for number in (0, 1)
    ]
    assert len({digest([sample] * 4) for sample in samples}) == len(samples)
