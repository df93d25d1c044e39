"""The steps and losses that a script tells in the lines it prints, and how it does so if it has words of its own."""

from __future__ import annotations

import math
import re

from elastic3d.errors import UsageError

STEP = re.compile(r"\bstep\b\D{0,3}(\d+)", re.IGNORECASE)
LOSS = re.compile(r"\bloss\b[^-\d]{0,3}(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|-?(?:nan|inf)\b)", re.IGNORECASE)
_EXAMPLE = r"'iter: *(\d+)'"
_DIGITS = re.compile(r"(?:(?:\\d|\[0-9\]|\[\\d\]|[0-9])(?:[+*?][+?]?|\{[0-9]*,?[0-9]*\}[+?]?)?)+")
"""What is in a group that matches digits alone."""


def step_pattern(text: str) -> re.Pattern[str]:
    """Return the pattern of a line that tells a step, by default with `step 12` in it; UsageError where it can be none.

    text: a regular expression with one group, which matches digits; "" for the default.
    """
    if not text:
        return STEP
    what = f"--step-pattern {text!r}"
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{what}: it is no regular expression: {error}") from None
    if pattern.groups != 1:
        raise UsageError(f"{what}: it has {pattern.groups} groups; put one around the step's digits, as in {_EXAMPLE}")
    if not _DIGITS.fullmatch(_group(text)):
        raise UsageError(f"{what}: its group has to match digits and nothing else, as in {_EXAMPLE}")
    return pattern


def step_of(line: str, pattern: re.Pattern[str] = STEP) -> tuple[int, float] | None:
    """Return the step and the loss that a line of a script tells, None where it tells no step.

    The loss is NaN where it tells none. One that it tells as NaN is infinite: far from whatever it should be.
    """
    step, loss = pattern.search(line), LOSS.search(line)
    # A group may have been left out, or be empty.
    if step is None or not step[1]:
        return None
    if loss is None:
        return int(step[1]), math.nan
    value = float(loss[1])
    return int(step[1]), math.inf if math.isnan(value) else value


def _group(text: str) -> str:
    """Return what is in the group of a pattern that has one."""
    bare = re.sub(r"(?s)\\.", "..", text)
    bare = re.sub(r"\[\^?\]?[^\]]*\]", lambda one: "." * len(one[0]), bare)
    begin = re.search(r"\((?!\?)|\(\?P<\w+>", bare)
    assert begin is not None
    depth, at = 1, begin.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(bare[at], 0)
        at += 1
    return text[begin.end() : at - 1]
