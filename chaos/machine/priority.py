"""Who watches a job runs before those who are watched, where the machine has more to do than it can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PRIORITY = 1
"""Of a thread that watches, in the real-time class of sched(7): before every process of the usual class.

A nice value would not do. It counts within one control group or session (autogroup) alone, and each node is one of
its own: at a load of 14, a thread that slept for 10 ms and computed for 1 ms was up to 273 ms late with nice -15 as
without, and 95 in 100 times at most 54 ms; it was 9 ms and 1.6 ms late in this class. The kernel keeps 5% of the time
for others.
"""


@contextmanager
def before_others() -> Iterator[None]:
    """Run the block, in its thread, before other threads of the machine; its children begin as all others do.

    A whole small job can be over while its watcher waits for a processor, and nothing could be done to it any more.
    Where the user may not ask for that (EPERM without root), the block runs as it would have.
    """
    # On Linux, 0 is the calling thread.
    policy, usual = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        # What it forks is of the usual class.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(PRIORITY))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, usual)
