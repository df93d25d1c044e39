"""The kernel's last resort where a host's memory runs out: whom it kills, and whether it did.

A process that the kernel killed for its memory looks like one that somebody killed: it ends by SIGKILL. What tells them
apart is the count of such kills that the kernel keeps for the process's control group, `oom_kill` in `memory.events`
(cgroup v2) or in `memory.oom_control` (v1), which grows before the process is gone. In a container the group's files
may stand at the mount's root while its path names what is outside: the nearest folder that has one is looked at.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

SCORE = "1000"
"""All memory that there is more than it has: what a trainer adds to what the kernel goes by when it looks for a process
to kill. A keeper holds more than its trainers, and takes its node's snapshots with it."""

V1, V2 = ("memory.oom_control", "memory.limit_in_bytes"), ("memory.events", "memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillCount:
    """How often the kernel had killed for memory in a control group. file: where it says so, None for nowhere."""

    file: Path | None
    kills: int = 0

    @classmethod
    def of(cls, pid: int, proc: Path = Path("/proc")) -> KillCount:
        """Return the count of a living process's group."""
        try:
            groups = (proc / str(pid) / "cgroup").read_text().splitlines()
            mounts = (proc / str(pid) / "mounts").read_text().splitlines()
        except OSError:
            return cls(file=None)
        for file in _files(groups, mounts):
            count = _kills(file)
            if count is not None:
                return cls(file=file, kills=count)
        return cls(file=None)

    def killed_since(self) -> bool:
        """Return whether the kernel has killed in that group since."""
        now = _kills(self.file) if self.file is not None else None
        return now is not None and now > self.kills

    def limit(self) -> int:
        """Return the group's bytes, 0 where they are not known or not bounded."""
        if self.file is None:
            return 0
        name = (V1 if self.file.name == V1[0] else V2)[1]
        try:
            text = (self.file.parent / name).read_text().strip()
        except OSError:
            return 0
        # Where there is no bound, v1 writes one beyond all machines.
        return int(text) if text.isdecimal() and int(text) < 1 << 60 else 0


def be_killed_first(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Have the kernel kill this process, and those it starts, rather than their keeper. Silently nothing elsewhere."""
    with contextlib.suppress(OSError):
        path.write_text(SCORE)


def _files(groups: list[str], mounts: list[str]) -> list[Path]:
    """Return where the counts of a process's groups may stand, those of the nearest folders first."""
    files = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        name = (V1 if controllers else V2)[0]
        for root in _mounted(mounts, v1=bool(controllers)):
            folder = root / path.lstrip("/")
            files += [at / name for at in (folder, *folder.parents) if at == root or root in at.parents]
    return files


def _mounted(mounts: list[str], *, v1: bool) -> list[Path]:
    roots = []
    for line in mounts:
        _, where, kind, options, *_ = line.split()
        if kind == ("cgroup" if v1 else "cgroup2") and (not v1 or "memory" in options.split(",")):
            roots.append(Path(where))
    return roots


def _kills(file: Path) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    count = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(count[1]) if count else None
