"""What looks like a fault and is none happens when it is due, however far ahead samples are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.scripts import mark_of
from chaos.scripts.train_strained import Strain, Strains


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_data_set_stalls_once_though_its_samples_were_read_before_their_step(late: int, tmp_path: Path) -> None:
    """Of `late` steps all samples have been read by the time that the step of the stall begins."""
    strains, stalls = Strains(given={4: Strain.parse("stall:1@4")}, out=tmp_path), []
    for step in range(10):
        strains.begin(1, step)
        if not 4 <= step < 4 + late:
            strains.meet({"stall": lambda step=step: stalls.append(step)})
    assert stalls == [4 + late]
    assert (tmp_path / mark_of(4)).exists()


def test_what_happens_in_a_step_happens_in_no_later_one(tmp_path: Path) -> None:
    """A strain of the forward pass that no forward pass met is over with its step, and nobody else's is met."""
    strains = Strains(given={2: Strain.parse("gc:1@2"), 3: Strain.parse("gc:0@3")}, out=tmp_path)
    met: list[int] = []
    for step in range(5):
        strains.begin(1, step)
        if step != 2:
            strains.meet({"gc": lambda step=step: met.append(step)})
    assert met == []
