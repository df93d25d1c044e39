"""Numbers of the command line that have to be some: neither infinity nor NaN, which no least value refuses."""

from __future__ import annotations

import math

import typer


def finite(value: float | None) -> float | None:
    """Return an option's value, None where it was not given; BadParameter where it is infinite or no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value:g}: give a number that is finite")
    return value
