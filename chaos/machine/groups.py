"""The control group of a node: how much its processes may have of a processor and of memory, where root may say so.

A node's first process enters the group before it starts anything, so that all that descends from it is in it, whatever
becomes of its parents. Below the own groups of whoever makes it, whose bounds hold too; of cgroup v2 below the root,
since a group there that has processes gives no controller on.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chaos.machine.makers import has_ended, maker
from chaos.machine.processes import wait_until

CPU, MEMORY = "cpu", "memory"
FILES = {CPU: ("cpu.max", "cpu.cfs_quota_us"), MEMORY: ("memory.max", "memory.limit_in_bytes")}
"""By what a controller bounds a group, of cgroup v2 and of v1."""

PERIOD = 100_000
"""Microseconds of which a quota is a share: the kernel's own."""


def parents(proc: Path = Path("/proc/self")) -> dict[str, Path]:
    """Return the folder below which a group is made, by controller; v1 where both versions have it."""
    lines = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    own = {controller: path.lstrip("/") for _, controllers, path in lines for controller in controllers.split(",")}
    folders: dict[str, Path] = {}
    for line in (proc / "mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        for controller in FILES:
            if kind == "cgroup" and controller in options.split(","):
                # In a container the path may name what is outside.
                folder = Path(where, own.get(controller, ""))
                folders[controller] = folder if folder.is_dir() else Path(where)
            elif kind == "cgroup2":
                folders.setdefault(controller, Path(where))
    return folders


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """The group of one node. cpu, memory: its folder that bounds this, None where none can; one folder of cgroup v2."""

    cpu: Path | None = None
    memory: Path | None = None

    @classmethod
    def made(cls, below: Mapping[str, Path]) -> Self:
        """Make a group below such folders as `parents` returns; without any folder where none can be made."""
        name = f"{maker()}-{uuid.uuid4().hex[:8]}"
        group = cls(cpu=_made(CPU, below, name), memory=_made(MEMORY, below, name))
        for folder in {parent / name for parent in below.values()} - {*group.folders}:
            _removed(folder)
        return group

    @property
    def folders(self) -> tuple[Path, ...]:
        """Its folders, each once."""
        return tuple(dict.fromkeys(folder for folder in (self.cpu, self.memory) if folder is not None))

    @property
    def entries(self) -> tuple[Path, ...]:
        """The files to which a process writes 0 to be in it, with all that it starts from then on."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)

    def quota(self, share: float | None) -> bool:
        """Let its processes have so much of one processor together, None for all; return whether that can be said."""
        if self.cpu is None:
            return False
        microseconds = None if share is None else str(round(share * PERIOD))
        return _write(self.cpu / "cpu.cfs_quota_us", microseconds or "-1") or _write(
            self.cpu / "cpu.max", f"{microseconds or 'max'} {PERIOD}"
        )

    def limit(self, nbytes: int | None) -> bool:
        """Let its processes have so many bytes together, None for all; return whether that can be said now.

        Not while the kernel cannot take back as many as they hold above that, of v1; of v2 it kills at once.
        """
        if self.memory is None:
            return False
        return _write(self.memory / "memory.limit_in_bytes", "-1" if nbytes is None else str(nbytes)) or _write(
            self.memory / "memory.max", "max" if nbytes is None else str(nbytes)
        )

    def held(self) -> int:
        """Return the bytes that cannot be taken back from its processes; of a group that bounds memory alone."""
        assert self.memory is not None
        text, kernel = (self.memory / "memory.stat").read_text(), self.memory / "memory.kmem.usage_in_bytes"
        if kernel.exists():  # v1
            text += f"kernel {kernel.read_text()}"
        # In v1, what tmpfs and shared memory hold counts as mapped files do; both versions have it apart.
        names = ("total_rss", "total_shmem") if "total_rss " in text else ("anon", "shmem")
        lines = re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)
        return sum(int(value) for name, value in lines if name in (*names, "kernel"))

    def pids(self) -> list[int]:
        """Return the processes that are in it."""
        return [int(pid) for entry in self.entries[:1] if entry.exists() for pid in entry.read_text().split()]

    def remove(self) -> bool:
        """Remove it; return False while there are processes in it."""
        return not [folder for folder in self.folders if not _removed(folder)]


def enter(entries: Iterable[str]) -> None:
    """Put this process into a group. OSError says why it cannot be."""
    for entry in entries:
        Path(entry).write_text("0")


def groups_left(groups: Iterable[NodeGroup], below: Mapping[str, Path], patience: float) -> list[str]:
    """Remove the groups of nodes that have ended, and those whose maker has; return what is left, as text.

    patience: seconds for what ends by itself. below: where to look for groups whose maker was killed.
    """
    folders = {folder for group in groups for folder in group.folders}
    folders |= {
        folder for parent in {*below.values()} for folder in parent.glob("elastic3d-*") if has_ended(folder.name)
    }
    wait_until(lambda: not [folder for folder in folders if not _removed(folder)], patience)
    return [f"control group {folder}" for folder in sorted(folders) if folder.exists()]


def _made(controller: str, below: Mapping[str, Path], name: str) -> Path | None:
    if controller not in below:
        return None
    folder = below[controller] / name
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder if any((folder / file).exists() for file in FILES[controller]) else None


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text)
    except OSError:
        return False
    return True
