"""Processes that SIGKILL does not end: which of a session's are such, and after how long that is taken for good.

A process that waits within the kernel for a file system or a driver dies when that answers, which may be never. One
that has begun to exit may need long as well, to give back its memory, and is left more time. What a process waits for
is a matter of each of its threads: its first one may be gone while another one cannot be killed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.health.processes import read_proc, stat_fields

BLOCKED = 10.0
"""Seconds after SIGKILL for which a process may wait within the kernel."""

EXITING = 120.0
"""The same for one that is exiting, or ready to run: on a large or busy machine both take their time."""

_PF_EXITING = 0x4
_SIGKILL = 1 << 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A process that was sent SIGKILL and is still there. state: of the thread that keeps it, as in /proc.

    exiting: all its threads have begun to exit. wchan: where in the kernel that thread waits, "" if it is not known.
    """

    pid: int
    state: str
    exiting: bool
    wchan: str = ""

    @property
    def patience(self) -> float:
        """Seconds for which it may still be there."""
        return BLOCKED if self.state == "D" and not self.exiting else EXITING

    def __str__(self) -> str:
        what = "is exiting" if self.exiting else "waits within the kernel" if self.state == "D" else "is there"
        at = f", in {self.wchan}" if self.wchan else ""
        return f"process {self.pid} {what} (state {self.state}{at})"


class TrainerUnkillable(Exception):
    """A trainer is still there long after it was killed: its slot cannot be used again."""

    def __init__(self, survivor: Survivor, seconds: float) -> None:
        super().__init__(
            f"{survivor} {seconds:.0f} s after SIGKILL, and may never end. See to what it waits for, mostly a file "
            "system or a device that does not answer, or start the machine anew; the job goes on without this node"
        )
        self.survivor, self.seconds = survivor, seconds


def due(survivor: Survivor, seconds: float) -> bool:
    """Return whether a process that has outlived SIGKILL for so long is taken never to end."""
    return seconds >= survivor.patience


def survivors(pids: Sequence[int]) -> list[Survivor]:
    """Return those of some processes that were sent SIGKILL, and of which a thread is not dead yet."""
    here = (_survivor(pid) for pid in pids)
    return [one for one in here if one is not None]


def _survivor(pid: int) -> Survivor | None:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    fields = {thread: stat_fields(f"{pid}/task/{thread}") for thread in threads}
    living = {thread: said for thread, said in fields.items() if said and said[0] not in "ZX"}
    if not living:
        return None
    exiting = all(int(said[6]) & _PF_EXITING for said in living.values())
    if not exiting and not any(_killed(f"/proc/{pid}/task/{thread}/status") for thread in living):
        return None
    # The thread in state D, if there is one, says best what it waits for.
    thread = min(living, key=lambda one: living[one][0] != "D")
    wchan = read_proc(f"/proc/{pid}/task/{thread}/wchan").strip()
    return Survivor(pid=pid, state=living[thread][0], exiting=exiting, wchan="" if wchan == "0" else wchan)


def _killed(status: str) -> bool:
    pending = [line.split()[1] for line in read_proc(status).splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & _SIGKILL for mask in pending)
