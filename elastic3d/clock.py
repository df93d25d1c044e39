"""The one place where time is read and slept. Everything else is given `now` or a `Clock`.

No wall clock is ever compared across hosts: `monotonic` times deadlines, `wall` stamps logs.
"""

from __future__ import annotations

import time
from typing import Protocol

nanoseconds = time.monotonic_ns
"""CLOCK_MONOTONIC in whole nanoseconds, as `SYSTEM.monotonic` has it in seconds; for what is written very often."""


class Clock(Protocol):
    """Time as a parameter."""

    def monotonic(self) -> float:
        """Return seconds that never run backwards; comparable within one host only."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch, for logs and people."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        ...


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        """Return CLOCK_MONOTONIC, which all processes of one host share."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the wall clock."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""
        time.sleep(seconds)


SYSTEM = SystemClock()


def processor_seconds() -> float:
    """Return the processor time this process has used in all its threads: other load does not lengthen it."""
    return time.process_time()
