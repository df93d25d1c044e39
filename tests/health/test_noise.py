"""What chance makes of a few values: against tables of Student's t, and against values that are drawn."""

from __future__ import annotations

import math
import random
from statistics import median, stdev

import pytest

from elastic3d.health.noise import Noise, spread, standard_error, student

TABLE = {
    (1e-3, 2): 22.33,
    (1e-3, 4): 7.173,
    (1e-3, 18): 3.610,
    (1e-5, 4): 23.33,
    (1e-5, 18): 5.722,
    (4e-7, 8): 13.65,
    (4e-7, 50): 5.636,
}
"""What Student's t exceeds, by chance and degrees of freedom."""


@pytest.mark.parametrize(("chance", "freedom"), TABLE)
def test_student(chance: float, freedom: int) -> None:
    """Never less than the table has, and hardly more but for two degrees of freedom."""
    exact = TABLE[chance, freedom]
    assert exact <= student(chance, freedom) <= exact * (1.3 if freedom == 2 else 1.11)


def test_of_one_value_nothing_is_known() -> None:
    """Whatever it is, it may be chance."""
    assert spread([1.0], 1).freedom == 0
    assert spread([1.0], 1).deviation == math.inf
    assert student(1e-3, 0) == math.inf


@pytest.mark.parametrize(("count", "last"), [(3, 3), (4, 3), (5, 5), (6, 3), (10, 4), (20, 17)])
def test_a_median_exceeds_it_no_more_often_than_it_may(count: int, last: int) -> None:
    """However few values there are, and whatever came before them: of 20,000 draws in as many as a hundred at most."""
    draw, chance, draws = random.Random(1), 0.005, 20_000
    above = 0
    for _ in range(draws):
        values = [draw.gauss(5.0, 1.0) for _ in range(count - last)] + [draw.gauss(0.0, 1.0) for _ in range(last)]
        known = spread(values, last)
        limit = student(chance, known.freedom) * standard_error(known.deviation, last)
        above += median(values[-last:]) > limit
    assert 0 < above <= chance * draws


@pytest.mark.parametrize("count", [3, 4, 5, 9, 33])
def test_the_standard_error_of_a_median(count: int) -> None:
    """To a few percent, and hardly less than it is."""
    draw = random.Random(1)
    exact = stdev(median(draw.gauss(0.0, 1.0) for _ in range(count)) for _ in range(20_000))
    assert 0.97 * exact <= standard_error(1.0, count) <= 1.12 * exact


def test_what_is_known_of_others_counts_only_so_much() -> None:
    """It has the same deviation, with fewer degrees of freedom."""
    much = Noise(deviations=30.0, freedom=30.0)
    assert much.limited(8.0) == Noise(deviations=8.0, freedom=8.0)
    assert much.limited(100.0) == much
    assert Noise().limited(8.0) == Noise()
