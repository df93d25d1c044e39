"""Repeats in one line of a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Values = Sequence[float | None]


def spread(values: Values, unit: str = " s", digits: int = 2) -> str:
    """Return the median with the least and the largest, and how many never came."""
    came = [value for value in values if value is not None]
    if not came:
        return f"none of {len(values)}"
    text = f"{statistics.median(came):.{digits}f}{unit} ({min(came):.{digits}f} to {max(came):.{digits}f})"
    return text if len(came) == len(values) else f"{text}, {len(values) - len(came)} of {len(values)} never"
