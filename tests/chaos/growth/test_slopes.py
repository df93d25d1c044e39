"""What counts as growth: a leak does; noise, a beginning, a sawtooth and a step do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from chaos.growth.measures import MB, PROCESS_MEMORY
from chaos.growth.slopes import FEWEST, HOUR, Bar, Point, fit, grows, warm_up

EVERY, GENERATION = 5.0, 20.0
BASE = 90 * MB


def series(seconds: float, value: Callable[[float], float], *, noise: float = 0.0, seed: int = 1) -> list[Point]:
    """Return a sample each EVERY seconds of a job with a generation each GENERATION seconds."""
    chance = random.Random(seed)
    times = [EVERY * number for number in range(int(seconds / EVERY))]
    return [Point(at=at, generation=1 + int(at / GENERATION), value=value(at) + chance.gauss(0, noise)) for at in times]


def found(points: list[Point], bar: Bar = PROCESS_MEMORY) -> bool:
    line = fit(points, since=warm_up(points[-1].at))
    assert line is not None
    return grows(line, bar)


@pytest.mark.parametrize("seconds", [20 * 60, 2 * HOUR, 24 * HOUR])
def test_a_leak_of_a_megabyte_a_generation_is_found(seconds: float) -> None:
    """In noise of some megabytes, whatever the length of the run; the line has its slope."""
    points = series(seconds, lambda at: BASE + MB * int(at / GENERATION), noise=3 * MB)
    line = fit(points, since=warm_up(seconds))
    assert line is not None
    assert line.per_generation == pytest.approx(MB, rel=0.05)
    assert line.per_hour == pytest.approx(HOUR / GENERATION * MB, rel=0.05)
    assert found(points)


def test_a_slow_leak_is_found_in_a_day() -> None:
    """Of three megabytes an hour, which no run of minutes can tell from noise."""
    assert found(series(24 * HOUR, lambda at: BASE + 3 * MB * at / HOUR, noise=3 * MB))
    assert not found(series(20 * 60, lambda at: BASE + 3 * MB * at / HOUR, noise=3 * MB))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda at: BASE, id="noise"),
        pytest.param(lambda at: BASE + 40 * MB * min(1.0, at / 200), id="a beginning"),
        pytest.param(lambda at: BASE + 20 * MB * (at % 97) / 97, id="a sawtooth"),
        pytest.param(lambda at: BASE + (30 * MB if at > 700 else 0), id="a step"),
        pytest.param(lambda at: BASE + (30 * MB if at > 400 else 0), id="an early step"),
        pytest.param(lambda at: BASE - 40 * MB * at / 1200, id="one that shrinks"),
        pytest.param(lambda at: BASE + (200 * MB if int(at) % 50 == 0 else 0), id="peaks"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_does_not_go_on_is_no_growth(value: Callable[[float], float], seed: int) -> None:
    """In twenty minutes, with noise of some megabytes."""
    assert not found(series(20 * 60, value, noise=3 * MB, seed=seed))


def test_a_descriptor_a_generation_is_found() -> None:
    """Counts have bars of their own."""
    bar = Bar(per_hour=2, per_generation=0.01, floor=8, share=0.1)
    assert found(series(20 * 60, lambda at: 60 + int(at / GENERATION), noise=1), bar)
    assert not found(series(20 * 60, lambda at: 60 + int(at / GENERATION) % 4, noise=1), bar)


def test_few_points_say_nothing() -> None:
    """Neither do those of the warm-up."""
    points = series(EVERY * FEWEST, lambda at: at)
    assert fit(points) is not None
    assert fit(points, since=EVERY) is None
    assert warm_up(24 * HOUR) == 2 * HOUR


def test_one_generation_has_no_slope_by_generation() -> None:
    """There is nothing to compare; that by the hour is there."""
    points = [Point(at=float(at), generation=1, value=2.0 * at) for at in range(40)]
    line = fit(points)
    assert line is not None
    assert line.per_generation == 0.0
    assert line.per_hour == pytest.approx(7200.0)
