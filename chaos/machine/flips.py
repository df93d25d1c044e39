"""Bits that change in the shared memory in which a process keeps snapshots."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from elastic3d.snapshots.arena import NAME

APART = 4096
"""Bytes from one changed bit to the next: less than any tile of more than a page has."""


def flip(pid: int) -> int:
    """Change a bit in each `APART` bytes of the snapshots' memory that a process has open; return how many.

    Memory that was never written stays untouched, and a process that is gone has none. Needs the right to open what
    /proc shows of it.
    """
    changed, seen = 0, set[int]()
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for path in opened:
        try:
            if os.readlink(path) != f"/memfd:{NAME} (deleted)":
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            inode = os.fstat(descriptor).st_ino
            if inode not in seen:
                seen.add(inode)
                changed += _flip(descriptor)
        finally:
            os.close(descriptor)
    return changed


def _flip(descriptor: int) -> int:
    size, changed = os.fstat(descriptor).st_size, 0
    if not size:
        return 0
    with mmap.mmap(descriptor, size) as memory:
        for first, stop in _written(descriptor, size):
            for offset in range(first + APART // 2, stop, APART):
                memory[offset] ^= 1
                changed += 1
    return changed


def _written(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that were written, as half-open ranges of bytes."""
    at = 0
    while at < size:
        try:
            first = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        at = os.lseek(descriptor, first, os.SEEK_HOLE)
        yield first, at
