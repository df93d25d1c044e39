"""Which torchrun agent a process belongs to, so that it ends with that agent and with no other.

After its agent has died, a process has the parent that adopted it: a keeper whose agent was killed while it imported
would take init for its agent, and train alone. So the agent names itself in the environment of its workers, by its pid
and the time at which it was started, since pids are reused.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from elastic3d import environment, threads
from elastic3d.clock import SYSTEM
from elastic3d.health.processes import stat_fields


def identity(pid: int) -> str:
    """Return a name of this process that is unique until the machine reboots; "" if it does not live."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in "ZX" else f"{pid}:{fields[19]}"


def begun() -> float:
    """Return when this node was started for the job, on the machine's monotonic clock: now, or `elastic3d agent`'s.

    To be called once, before anybody is waited for. The time at which the process was started is older where a shell
    has become it, and of no use to a second job of one process.
    """
    return float(environment.AGENT_BEGUN.take() or SYSTEM.monotonic())


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
