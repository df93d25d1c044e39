"""Durations as people read them."""

from __future__ import annotations

import pytest

from elastic3d.cli.durations import spell


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.44, "0.4 s"),
        (12.4, "12 s"),
        (59.6, "1 min"),
        (61.0, "1 min 1 s"),
        (3600.0, "1 h"),
        (7500.0, "2 h 5 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations_are_spelled_in_at_most_two_units(seconds: float, text: str) -> None:
    """Two units at most."""
    assert spell(seconds) == text
