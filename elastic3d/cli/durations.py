"""Durations as people write and read them: 500ms, 30s, 10m, 1h."""

from __future__ import annotations

import re

from elastic3d.errors import UsageError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# Six digits are more than a century of hours, and less than the longest lease of etcd.
_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(ms|s|m|h)?")


def duration(text: str, name: str) -> float:
    """Return the seconds of `text`; UsageError, beginning with `name`, for what is no duration or has no unit."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(f"{name} {text!r}: give a number with ms, s, m or h, such as 30s or 10m")
    if match[2] is None:
        raise UsageError(f"{name} {text!r}: a duration needs a unit; write {text}s for seconds, or use ms, m or h")
    seconds = float(match[1]) * _UNITS[match[2]]
    if seconds <= 0:
        raise UsageError(f"{name} {text!r}: a duration must be longer than nothing")
    return seconds


def spell(seconds: float) -> str:
    """Return a duration in few letters: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for size, unit, below, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"
