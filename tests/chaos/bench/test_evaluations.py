"""The measurement of what an evaluation costs beyond its passes."""

from __future__ import annotations

import pytest

from chaos.bench import evaluations
from chaos.bench.evaluations import BAR, Pair, cost_of


def pair(value: float, run: float, hand: float, share: float = 1.0, passes: float = 1.0) -> Pair:
    """Return one rank's: seconds of the processor, half of them by the clock. share: of the samples.

    By hand a tenth of a second is spent outside of passes.
    """
    return {"run": (value, run, passes, run / 2), "hand": (4 * value * share, hand, hand - 0.1, hand / 2)}


def test_the_time_of_all_ranks_counts_and_by_the_clock_that_of_the_slowest() -> None:
    cost = cost_of("pp=1,dp=2", 4, [[pair(2.0, 3.0, 2.0, 0.25, 2.0)], [pair(2.0, 3.0, 4.0, 0.75, 2.0)]])
    assert (cost.by_hand, cost.seconds) == ((0.0,), (1.5,))
    assert cost.outside == (pytest.approx((2.0 - 0.2) / 4.0),)


def test_stages_have_no_passes_of_their_own_to_compare_with() -> None:
    assert cost_of("pp=2,dp=1", 4, [[pair(2.0, 3.0, 2.0, 0.5, 0.0)], [pair(2.0, 3.0, 4.0, 0.5, 0.0)]]).outside is None


def test_another_value_than_by_hand_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match=r"run.evaluate returned 2.0, and by hand it is 1.0"):
        cost_of("pp=1,dp=1", 8, [[pair(2.0, 1.0, 1.0)]])


@pytest.mark.parametrize("slower", [0.5 * BAR, 2 * BAR])
@pytest.mark.parametrize("inside", [0.0, 1.0])
def test_what_is_outside_of_passes_has_to_be_below_the_bar_by_the_median(slower: float, inside: float) -> None:
    pairs = [pair(2.0, 1 + share, 1.0, passes=0.9 + inside * share) for share in (slower, -0.5, 0.5)]
    assert evaluations.passed([cost_of("pp=1,dp=1", 4, [pairs])]) == (slower < BAR or inside == 1.0)


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.gloo
def test_both_ways_come_to_the_same_value_in_every_layout() -> None:
    """At a size that says nothing about speed."""
    costs = evaluations.measure(1, samples=24)
    assert [cost.layout for cost in costs] == list(evaluations.LAYOUTS)
    assert evaluations.table(costs).row_count == len(costs)
