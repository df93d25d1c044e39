"""Durations, intervals, rates and sizes, which people write as `"30s"`, `"200MB/s"` or `"100GB"`.

One grammar and the same words wherever they enter: `--rdzv-conf`, the options of `elastic3d.run`, the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic3d.errors import UsageError

TIMES = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of time."""

_SIZES = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)}} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_TIME = re.compile(_NUMBER + "(?: ?(ms|s|m|h))?")
_SIZE = re.compile(_NUMBER + f" ?({'|'.join(_SIZES)})")

CONTINUOUS = "continuous"

LONGEST = 10 * 365 * 86400.0
"""Most seconds: nobody means to wait longer, and etcd grants no longer lease either."""

NO_TIME = "give seconds, or a number with ms, s, m or h, such as '30s', '10m' or '1h', and at most ten years"
NO_SIZE = "give bytes, such as '100GB' or '64MiB'"
NO_RATE = "give bytes per second, such as '200MB/s'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """When a checkpoint is due: this many steps, or seconds, after the one before; both 0 for never."""

    steps: int = 0
    seconds: float = 0.0


def every(value: int | str, name: str) -> Every:
    """Return the interval of a value: a number of steps, "30s", or "continuous"; UsageError, beginning with `name`.

    Continuous is every step: a checkpoint is never due before the last one is committed.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Every(steps=value)
    if value == CONTINUOUS:
        return Every(steps=1)
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    # Without a unit it might be meant as steps.
    after = parse_seconds(value) if match is not None and match[2] is not None else None
    if not after:
        raise UsageError(
            f"{name}={value!r}: give a number of steps (0 for never), a time such as '30s' or '5m', or '{CONTINUOUS}'"
        )
    return Every(seconds=after)


def parse_seconds(value: float | str) -> float | None:
    """Return seconds: a number from 0, or text such as "30s", "1.5 h" or "2"; None for anything else, or too long."""
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        long = None if match is None else float(match[1]) * TIMES[match[2] or "s"]
    else:
        long = value if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None
    return float(long) if long is not None and long <= LONGEST else None


def seconds(value: float | str, name: str) -> float:
    """Return the seconds that `parse_seconds` reads; UsageError, beginning with `name`, if it reads none."""
    long = parse_seconds(value)
    if long is None:
        raise UsageError(f"{name}={value!r}: {NO_TIME}")
    return long


def some_seconds(value: float | str, name: str) -> float:
    """Return `seconds`, more than 0; UsageError otherwise."""
    long = seconds(value, name)
    if not long:
        raise UsageError(f"{name}={value!r}: give more than 0")
    return long


def size(value: int | str, name: str) -> int:
    """Return bytes: a whole number, or text such as "100GB" or "64MiB"; UsageError, beginning with `name`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(float(match[1]) * _SIZES[match[2]]) < 1:
        raise UsageError(f"{name}={value!r}: {NO_SIZE}")
    return int(float(match[1]) * _SIZES[match[2]])


def rate(value: int | str, name: str) -> int:
    """Return bytes per second: a whole number, or text such as "200MB/s"; UsageError, beginning with `name`."""
    text = value.removesuffix("/s") if isinstance(value, str) else value
    if isinstance(value, str) and text == value:
        raise UsageError(f"{name}={value!r}: {NO_RATE}")
    try:
        return size(text, name)
    except UsageError as error:
        raise UsageError(f"{name}={value!r}: {NO_RATE}") from error


def whole(value: object, name: str, least: int, of: str) -> None:
    """Raise UsageError, naming option `name` of `of`, for what is not a whole number of at least so much."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{of}({name}={value!r}): give a whole number, {least} or more")
