"""Durations as people write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.cli.durations import duration, spell
from elastic3d.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("10m", 600.0), ("1h", 3600.0), ("500ms", 0.5), ("1.5h", 5400.0), ("0.25s", 0.25)],
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    """Hours, minutes, seconds and milliseconds, whole or not."""
    assert duration(text, "--for") == seconds


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{0,7}\.?[0-9]{0,3}(ms|s|m|h)?", fullmatch=True))
def test_anything_else_is_refused_by_name(text: str) -> None:
    """Whatever is no duration is the caller's to change, and the message begins with where it was given."""
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?(ms|s|m|h)", text) and float(text.rstrip("msh")):
        assert duration(text, "--for") > 0
    else:
        with pytest.raises(UsageError, match=r"^--for "):
            duration(text, "--for")


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
def test_spelled(seconds: float, text: str) -> None:
    """Two units at most."""
    assert spell(seconds) == text
