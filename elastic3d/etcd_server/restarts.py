"""When a member that ended is started again: at once the first time, ever later if it ends again and again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST, LONGEST = 0.5, 30.0
"""Seconds until the first start after an end, and the most."""

STEADY = 60.0
"""Seconds of life after which an end counts as the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start that is due. times: ends in a row before it. at: monotonic seconds."""

    times: int
    at: float


def next_restart(times: int, *, started: float, now: float) -> Restart:
    """Return the next start of a member that ended at `now`. times: its ends in a row before this one."""
    times = 1 if now - started >= STEADY else times + 1
    return Restart(times=times, at=now + min(FIRST * 2 ** (min(times, 16) - 1), LONGEST))
