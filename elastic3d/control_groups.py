"""What the kernel's control groups allow this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


def memory_limits(read: Callable[[str], str]) -> Iterator[int]:
    """Yield the bytes that this process's control groups and their parents allow, versions 2 and 1.

    A container's group is the root of those it sees. read: returns a file's text, raises OSError if there is none.
    """
    for limit, _, _ in _limits(read):
        yield limit


def memory_left(read: Callable[[str], str]) -> Iterator[int]:
    """Yield the bytes that each of them allows beyond what it uses; pages of files that nobody uses can be had, too.

    read: as `memory_limits` takes it.
    """
    for limit, folder, files in _limits(read):
        try:
            used = int(read(f"{folder}/{files.used}"))
            stat = dict(line.split() for line in read(f"{folder}/memory.stat").splitlines())
        except OSError:
            used, stat = 0, {}  # it does not say
        yield max(limit - max(used - int(stat.get(files.unused, 0)), 0), 0)


class _Files(NamedTuple):
    """Names of a version's files of a group, and of what of the pages of files is not in use in its memory.stat."""

    limit: str
    used: str
    unused: str


_TWO = _Files("memory.max", "memory.current", "inactive_file")
_ONE = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limits(read: Callable[[str], str]) -> Iterator[tuple[int, str, _Files]]:
    """Yield each limit, the folder of its group and the names of the files there."""
    try:
        lines = read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, files = "/sys/fs/cgroup", _TWO
        elif "memory" in controllers.split(","):
            base, files = "/sys/fs/cgroup/memory", _ONE
        else:
            continue
        path = Path(group)
        for one in (path, *path.parents):
            folder = f"{base}{str(one).rstrip('/')}"
            try:
                text = read(f"{folder}/{files.limit}").strip()
            except OSError:
                continue
            if text.isdecimal():
                yield int(text), folder, files
