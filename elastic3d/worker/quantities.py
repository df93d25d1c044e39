"""How often, how fast, how much: what people write as `"30s"`, `"200MB/s"` or `"100GB"`, checked where it enters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic3d.errors import UsageError

_TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)}} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?"
_TIME = re.compile(_NUMBER + "(ms|s|m|h)")
_SIZE = re.compile(_NUMBER + f"({'|'.join(_SIZES)})")

CONTINUOUS = "continuous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When a checkpoint is due: so many steps, or so many seconds, after the one before; both 0 for never."""

    steps: int = 0
    seconds: float = 0.0


def every(value: int | str, name: str) -> Every:
    """Return how often `value` means: a number of steps, "30s", or "continuous"; UsageError, beginning with `name`.

    Continuous is every step of which the one before has been committed: a checkpoint is never due earlier than that.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Every(steps=value)
    if value == CONTINUOUS:
        return Every(steps=1)
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise UsageError(
            f"{name}={value!r}: give a number of steps (0 for never), a time such as '30s' or '5m', or '{CONTINUOUS}'"
        )
    return Every(seconds=float(match[1]) * _TIMES[match[2]])


def seconds(value: float | str, name: str) -> float:
    """Return seconds: a number from 0, or text such as "30s" or "2m"; UsageError, beginning with `name`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"{name}={value!r}: give a time such as '30s' or '2m'")
    return float(match[1]) * _TIMES[match[2]]


def size(value: int | str, name: str) -> int:
    """Return bytes: a whole number, or text such as "100GB" or "64MiB"; UsageError, beginning with `name`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(float(match[1]) * _SIZES[match[2]]) < 1:
        raise UsageError(f"{name}={value!r}: give bytes, such as '100GB' or '64MiB'")
    return int(float(match[1]) * _SIZES[match[2]])


def rate(value: int | str, name: str) -> int:
    """Return bytes a second: a whole number, or text such as "200MB/s"; UsageError, beginning with `name`."""
    text = value.removesuffix("/s") if isinstance(value, str) else value
    if isinstance(value, str) and text == value:
        raise UsageError(f"{name}={value!r}: give bytes a second, such as '200MB/s'")
    try:
        return size(text, name)
    except UsageError as error:
        raise UsageError(f"{name}={value!r}: give bytes a second, such as '200MB/s'") from error
