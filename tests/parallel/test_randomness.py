"""The seeds of random numbers: of the place in the run and in the model, and of nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from elastic3d.devices.cpu import CpuDevice
from elastic3d.parallel.randomness import Randomness, keyed_seed


class Told(CpuDevice):
    """Notes seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)


@pytest.mark.parametrize("part", [None, 3])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("chunk", [None, 0, 2])
@pytest.mark.parametrize("place", ["start", "blocks.11 in", "it's", 'a "b"', "ü"])
def test_a_seed_is_keyed_by_all_that_names_its_place(
    place: str, chunk: int | None, parts: bool, part: int | None
) -> None:
    device: Any = Told()
    randomness = Randomness(17, device)
    randomness.part = part
    randomness.at(1000, 7, chunk=chunk)
    randomness.enter(place, parts=parts)
    where = (1000, 7) if chunk is None else (1000, 7, chunk)
    assert device.seeds == [keyed_seed(17, *where, *((place, part) if parts else (place,)))]
