"""Stop processes of this machine for some seconds, and let them go on: a program, apart from those that it stops.

    python -I -S stopping.py 5 412 413        these two
    python -I -S stopping.py 5 --below 400    process 400 and all that descend from it, but for this program

It holds on to processes rather than to their numbers, and ends with the last of them: nothing is left of it where they
are killed meanwhile. Run as a file, since it has to stop them at once: it imports nothing but Python's own modules.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if it is gone."""
    pids: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    except OSError:
        pass  # it is gone, or one of its threads is: those that it had found are looked at
    return pids


def below(root: int, *, but: int = 0) -> list[int]:
    """Return the pids of a process and of all that descend from it, parents first, without `but`."""
    pids = [root]
    for pid in pids:
        pids += [child for child in children(pid) if child != but and child not in pids]
    return pids


def stop(pids: Callable[[], Sequence[int]]) -> list[int]:
    """SIGSTOP all processes that `pids` returns, asked until it returns no more; return handles on them."""
    handles: dict[int, int] = {}
    while new := [pid for pid in pids() if pid not in handles]:
        for pid in new:
            try:
                handles[pid] = os.pidfd_open(pid)
                signal.pidfd_send_signal(handles[pid], signal.SIGSTOP)
            except ProcessLookupError:
                handles.setdefault(pid, -1)
    return [handle for handle in handles.values() if handle >= 0]


def wait(handles: Sequence[int], seconds: float) -> None:
    """Return after `seconds`, or once all these processes have ended."""
    left = set(handles)
    poll = select.poll()
    for handle in left:
        poll.register(handle, select.POLLIN)

    def over(_number: int, _frame: object) -> NoReturn:
        raise InterruptedError

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        while left:
            for handle, _ in poll.poll():
                poll.unregister(handle)
                left.discard(handle)
    except InterruptedError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(arguments: Sequence[str]) -> None:
    """Stop, wait, and let go on, children before their parents."""
    seconds, *named = arguments
    if named[0] == "--below":
        root = int(named[1])
        handles = stop(lambda: below(root, but=os.getpid()))
    else:
        pids = [int(pid) for pid in named]
        handles = stop(lambda: pids)
    wait(handles, float(seconds))
    for handle in reversed(handles):
        try:
            signal.pidfd_send_signal(handle, signal.SIGCONT)
        except ProcessLookupError:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
