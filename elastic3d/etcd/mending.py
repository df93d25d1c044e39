"""A node that starts and has to write waits for an etcd that takes no writes, as it does for one that is away.

Members of a job train on meanwhile, and one that comes must not be lost for what people are about to mend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic3d import output
from elastic3d.clock import Clock
from elastic3d.etcd.failures import Impaired

T = TypeVar("T")

MENDING = 30.0
"""Seconds for which a write is tried again."""

POLL = 0.2
"""Seconds between two tries."""


def once_mended(write: Callable[[], T], clock: Clock) -> T:
    """Return what `write` returns once etcd takes it, and say what is waited for, once; `Impaired` after `MENDING`."""
    until, said = clock.monotonic() + MENDING, False
    while True:
        try:
            return write()
        except Impaired as error:
            if clock.monotonic() >= until:
                raise
            if not said:
                output.say(f"{error}; trying for {MENDING:g} s more")
            said = True
            clock.sleep(POLL)
