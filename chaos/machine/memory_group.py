"""A control group that bounds the memory of a node's processes, so that the kernel kills one where it runs out.

    with MemoryGroup("name") as group:
        group.add(pid)              # and its descendants
        group.limit(200 << 20)      # bytes beside what its processes hold now

Needs root and a memory controller that may be written to, of cgroup v1 or v2.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos.machine.processes import descendants

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """The group of that name. OSError says why it cannot be made."""

    def __init__(self, name: str) -> None:
        self._v1 = (V1 / "memory.limit_in_bytes").exists()
        self.folder = (V1 if self._v1 else V2) / name

    def add(self, pid: int) -> None:
        """Have a process in it, what descends from it, and what they start from then on."""
        added: set[int] = set()
        while new := {pid, *descendants(pid)} - added:
            for one in new:
                try:
                    (self.folder / "cgroup.procs").write_text(str(one))
                except ProcessLookupError:
                    continue
            added |= new

    def limit(self, room: int) -> None:
        """Let its processes have so many bytes beside what they hold now."""
        (self.folder / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(str(self._held() + room))

    def _held(self) -> int:
        """Return the bytes that cannot be taken back from its processes."""
        text = (self.folder / "memory.stat").read_text()
        # In v1, what tmpfs and shared memory hold counts as mapped files do; both versions have it apart.
        names = ("total_rss", "total_shmem") if self._v1 else ("anon", "shmem", "kernel")
        return sum(int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE) if name in names)

    def __enter__(self) -> Self:
        self.folder.mkdir()
        if not (self.folder / "memory.stat").exists():
            self.folder.rmdir()
            raise OSError(f"{self.folder.parent} bounds no memory: its memory controller is not given on")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.folder.rmdir()
