"""What it costs to be seen: a small measurement of the real parts comes to something, and nothing is left out."""

from __future__ import annotations

from chaos.bench import seeing


def test_each_part_is_measured_with_those_before_it() -> None:
    """Without a bar on a machine that others use: tens of times as much would be a mistake all the same."""
    (cost,) = seeing.measure(1, worlds=((2, 2),), steps=96)
    assert tuple(cost.micros) == seeing.PARTS
    assert all(len(took) == 3 and min(took) >= 0 for took in cost.micros.values())
    assert (cost.nodes, cost.ranks) == (2, 4)
    assert 0 < cost.share < 30 * seeing.BAR
    assert seeing.table([cost]).row_count == 1
