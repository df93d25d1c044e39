"""What the kernel's control groups allow this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path


def memory_limits(read: Callable[[str], str]) -> Iterator[int]:
    """Yield the bytes that this process's control groups and their parents allow, versions 2 and 1.

    A container's group is the root of those it sees. read: returns a file's text, raises OSError if there is none.
    """
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, file = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        path = Path(group)
        for folder in (path, *path.parents):
            try:
                text = read(f"{base}{str(folder).rstrip('/')}/{file}").strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text)
