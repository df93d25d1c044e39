"""A file system of which some calls are never answered, as a network's whose server is gone: FUSE on /dev/fuse.

    with HungFiles(folder) as files:
        open(files.data).read()  # waits in state D; SIGKILL ends it
        os.stat(files.name)      # waits for ever: once it was sent a signal nothing ends it but `release`

Needs root and the kernel's FUSE. Protocol: linux/fuse.h, 7.31; only what looking up, opening and reading need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import threading
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

_ENOENT, _ENOSYS = 2, 38
_ASYNC_READ = 1
_NODEV_NOSUID = 6
_FORCE, _DETACH = 1, 2
_ROOT, _DATA = 1, 2
_SIZE = 1 << 20
_FOR = 3600
"""Seconds for which the kernel remembers what it was told."""


class _Operation(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    INTERRUPT = 36
    BATCH_FORGET = 42


_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")


class HungFiles:
    """The file system at `folder`, which is made. data: a file whose bytes never come. name: one that is never found.

    unanswered: requests that were heard and have no answer. Until it is heard, SIGKILL takes a request back.

    OSError says why it cannot be mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.data, self.name = folder, folder / "data", folder / "never"
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._device = -1
        self.unanswered = 0

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        try:
            self._call("mount", b"hung", os.fsencode(self.folder), b"fuse", _NODEV_NOSUID, options.encode())
        except OSError:
            os.close(self._device)
            raise
        threading.Thread(target=self._serve, name="hung-files", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def release(self) -> None:
        """End all waits, with an error for who waits, and the file system itself. Idempotent."""
        if self._device >= 0:
            self._call("umount2", os.fsencode(self.folder), _FORCE | _DETACH)
            self._device = -1

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fsdecode(self.folder))

    def _serve(self) -> None:
        device = self._device
        while True:
            try:
                request = os.read(device, _SIZE)
            except OSError:
                break  # it was unmounted
            _, operation, unique, node = _HEADER.unpack_from(request)[:4]
            answer = _answered(operation, node, request[_HEADER.size :])
            if answer is not None:
                error, data = answer
                with contextlib.suppress(OSError):
                    os.write(device, _ANSWER.pack(_ANSWER.size + len(data), -error, unique) + data)
            elif operation in (_Operation.LOOKUP, _Operation.READ):
                self.unanswered += 1
        os.close(device)


def _answered(operation: int, node: int, given: bytes) -> tuple[int, bytes] | None:
    """Return an error's number, 0 for none, and what is said; None for silence."""
    match operation:
        case _Operation.INIT:
            flags = struct.unpack_from("<IIII", given)[3] & _ASYNC_READ
            return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, flags, 12, 9, 1 << 16, 1, 16, 0, 0, *[0] * 7)
        case _Operation.LOOKUP:
            name = given.rstrip(b"\0")
            if name == b"data":
                return 0, struct.pack("<QQQQII", _DATA, 0, _FOR, _FOR, 0, 0) + _attributes(_DATA)
            return None if name == b"never" else (_ENOENT, b"")
        case _Operation.GETATTR:
            return 0, struct.pack("<QII", _FOR, 0, 0) + _attributes(node)
        case _Operation.OPEN:
            return 0, struct.pack("<QII", 1, 0, 0)
        case _Operation.RELEASE | _Operation.FLUSH:
            return 0, b""
        case _Operation.READ | _Operation.FORGET | _Operation.BATCH_FORGET | _Operation.INTERRUPT:
            # The last three have no answer.
            return None
        case _:
            return _ENOSYS, b""


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o644
    size = 0 if node == _ROOT else _SIZE
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
