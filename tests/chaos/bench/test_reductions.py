"""The benchmark of reductions: real crews in turns, and ratios of consecutive turns."""

from __future__ import annotations

import pytest

from chaos.bench.reductions import Comparison, Size, compare
from chaos.bench.steppers import Task
from elastic3d.values import Layout

pytestmark = pytest.mark.long


def test_costs_compare_consecutive_turns() -> None:
    """A machine that becomes slow under both is no difference between them."""
    comparison = Comparison(title="", base="a", seconds={"a": [1.0, 10.0], "b": [1.1, 11.0]})
    assert comparison.costs("b") == pytest.approx([10.0, 10.0])


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=1), Layout(pp=1, dp=2, zero=1)], ids=Layout.request)
def test_crews_take_turns(layout: Layout) -> None:
    """Ours and plain torch make their clipped steps, and every turn has a time."""
    tasks = {
        name: Task(layout=layout, reduction=name, rounds=2, width=32, depth=2, clip=True) for name in ("", "ordered")
    }
    comparison = compare("small", tasks, "", Size(turns=2, steps=1))
    assert [len(turns) for turns in comparison.seconds.values()] == [2, 2]
    assert all(seconds > 0 for turns in comparison.seconds.values() for seconds in turns)
