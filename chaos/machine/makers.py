"""Who made what outlives a process on this machine: a mark, by which others remove it once its maker has ended.

For what the kernel keeps when its maker is killed: control groups, and networks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path


def maker() -> str:
    """Return the mark of this process, of letters, digits and hyphens."""
    return f"elastic3d-{_space()}-{os.getpid()}"


def has_ended(mark: str) -> bool:
    """Return whether `mark`, or what begins with it and a hyphen, is of a process that has ended.

    Not of one that cannot be seen from here, nor where another process has its pid by now.
    """
    made = re.match(rf"elastic3d-{_space()}-(\d+)(-|$)", mark)
    return made is not None and not Path("/proc", made[1]).exists()


def _space() -> int:
    """Return the number of the PID namespace: containers that share a kernel's names have pids of their own."""
    return Path("/proc/self/ns/pid").stat().st_ino
