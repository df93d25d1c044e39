"""A file system of its own in memory, which can be full or read-only for a while: tmpfs, by mounting it anew.

    with SmallDisk(folder) as disk:
        disk.fill()     # no write finds room
        disk.restore()

Needs root. What is on it is gone at the end.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

SIZE = 1 << 30
"""Bytes that fit on it; of memory it takes what is written."""

_READ_ONLY, _REMOUNT = 1, 32
_DETACH = 2


class SmallDisk:
    """The file system at `folder`, which is made; where it is there, what is in it is out of sight until the end.

    OSError says why it cannot be mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mount(0, SIZE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whoever still has a file open keeps it until then.
        self._call("umount2", os.fsencode(self.folder), _DETACH)

    def fill(self) -> None:
        """Leave no room: what is there stays, and can be read and deleted."""
        while True:
            used = os.statvfs(self.folder)
            try:
                self._mount(_REMOUNT, (used.f_blocks - used.f_bfree) * used.f_frsize)
            except OSError as error:
                # Something was written in between.
                if error.errno != errno.EINVAL:
                    raise
            else:
                return

    def protect(self) -> bool:
        """Refuse all writes; return False while somebody has a file open to write to it."""
        try:
            self._mount(_REMOUNT | _READ_ONLY, SIZE)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def restore(self) -> None:
        """Take writes again."""
        self._mount(_REMOUNT, SIZE)

    def _mount(self, flags: int, size: int) -> None:
        # Of 0 bytes there would be no bound.
        options = f"size={max(size, os.sysconf('SC_PAGE_SIZE'))},mode=0755".encode()
        self._call("mount", b"small", os.fsencode(self.folder), b"tmpfs", flags, options)

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fsdecode(self.folder))
