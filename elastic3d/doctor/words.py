"""Amounts as people read them in a finding."""

from __future__ import annotations

_SIZES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def spell_size(count: float) -> str:
    """Return bytes with three digits that count: 61.2 GiB."""
    for unit, size in _SIZES:
        if count >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def spell_rate(count: float) -> str:
    """Return bytes a second: 180 MB/s."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3)):
        if count >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B/s"


def spell_time(seconds: float) -> str:
    """Return a time with three digits that count: 1.42 s, 12.4 ms."""
    for unit, size in _TIMES:
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return "0 s" if seconds <= 0 else f"{_three(seconds / 1e-6)} us"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
