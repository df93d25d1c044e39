"""Which torchrun agent a process belongs to, so that it ends with that agent and with no other.

After its agent has died, a process has the parent that adopted it: a keeper whose agent was killed while it imported
would take init for its agent, and train alone. So the agent names itself in the environment of its workers, by its pid
and the time at which it was started, since pids are reused.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import sys
import time
from collections.abc import Callable

from elastic3d import environment, threads
from elastic3d.clock import SYSTEM
from elastic3d.health.processes import stat_fields

_TORCHRUN = ("bin/torchrun", "torch/distributed/run.py")
"""How the path of torchrun's program ends: of the command, and of the module."""


def identity(pid: int) -> str:
    """Return a name of this process that is unique until the machine reboots; "" if it does not live."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in "ZX" else f"{pid}:{fields[19]}"


_starts = itertools.count()
"""Jobs that this process has begun: it was started for the first of them alone."""


def begun() -> float:
    """Return when this node was started for the job, on the machine's monotonic clock. To be called once for each job.

    `elastic3d agent` says so; torchrun was started for its one job; anybody else begins it now.
    """
    given, first = environment.AGENT_BEGUN.take(), next(_starts) == 0
    if given is not None:
        return float(given)
    return SYSTEM.monotonic() - (_age() if first and sys.argv[0].endswith(_TORCHRUN) else 0.0)


def _age() -> float:
    """Return the seconds since this interpreter began to import, by its `logging`, with which torch begins.

    A process is older where a shell has become it. But it is an upper limit: a wall clock may have been set meanwhile.
    """
    fields = stat_fields("self")
    process = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    return min(max(0.0, logging.makeLogRecord({}).relativeCreated / 1000), process)


def pid_of(agent: str) -> int:
    """Return the pid in an `identity`."""
    return int(agent.partition(":")[0])


def lives(agent: str) -> bool:
    """Return whether the process of this `identity` lives."""
    return identity(pid_of(agent)) == agent


def end_with(agent: str, end: Callable[[], object]) -> None:
    """Call `end` from a thread when the agent is gone.

    For a process that is not the agent's own child because a wrapper or a shell is between them: the parent-death
    signal would report only that one's death.
    """
    try:
        handle = os.pidfd_open(pid_of(agent))
    except ProcessLookupError:
        end()
        return
    if not lives(agent):
        end()
    threads.start(_wait, handle, end, name="elastic3d-agent")


def _wait(handle: int, end: Callable[[], object]) -> None:
    select.select([handle], [], [])
    end()
