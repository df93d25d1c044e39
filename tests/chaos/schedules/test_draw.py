"""Drawn histories are possible, and are the same for the same seed."""

from __future__ import annotations

import pytest

from chaos.schedules.draw import draw
from chaos.schedules.schedule import bounds, check


@pytest.mark.parametrize("seed", range(200))
def test_a_drawn_history_is_possible(seed: int) -> None:
    """No fault names a missing node or a step that never comes, and somebody survives."""
    history = draw(seed, 24)
    check(history.faults, nodes=history.nodes, steps=24)
    low, high = bounds(history.faults, history.nodes)
    assert 1 <= low <= high
    assert str(draw(seed, 24)) == str(history)


def test_draws_cover_every_kind_of_history() -> None:
    """Two hundred seeds include kills at one step, kills in a recovery, joins, two slots, one node, and no fault."""
    drawn = [draw(seed, 24) for seed in range(200)]
    texts = [str(history) for history in drawn]
    assert any("@g" in text for text in texts)
    assert any("join" in text for text in texts)
    assert any(history.slots == 2 for history in drawn)
    assert any(history.nodes == 1 for history in drawn)
    assert any(not history.faults for history in drawn)
    assert any(len({fault.when for fault in history.faults}) < len(history.faults) for history in drawn)
