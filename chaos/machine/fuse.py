"""File systems that a thread of this process serves: what all of them say to the kernel's FUSE on /dev/fuse.

Needs root and the kernel's FUSE. Protocol: linux/fuse.h, 7.31; only what looking up, opening, reading and writing need.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

ROOT = 1
"""The number of the folder itself; files have others."""

_ASYNC_READ = 1
_NODEV_NOSUID = 6
_FORCE, _DETACH = 1, 2
_MOST = 1 << 20
"""Bytes of the longest request: more than the kernel writes at once, 1 << 16 as it is told."""

_HEADER = struct.Struct("<IIQQIIIHH")
_ANSWER = struct.Struct("<IiQ")
_GIVEN_TO_WRITE = struct.Struct("<QQIIQII")


class Operation(IntEnum):
    """The kernel's requests, as far as any file system here answers them."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    WRITE = 16
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    INTERRUPT = 36
    BATCH_FORGET = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. unique: by which it is answered. node: the file's number. given: what its operation brings."""

    operation: int
    unique: int
    node: int
    given: bytes

    @property
    def name(self) -> bytes:
        """The name that is looked up."""
        return self.given.rstrip(b"\0")

    @property
    def span(self) -> tuple[int, int]:
        """Where is to be read, and how many bytes."""
        _, offset, size = struct.unpack_from("<QQI", self.given)
        return offset, size

    @property
    def written(self) -> bytes:
        """The bytes that are to be written."""
        return self.given[_GIVEN_TO_WRITE.size :]


Answer = tuple[int, bytes]
"""An error's number, 0 for none, and what is said."""

UNKNOWN: Answer = errno.ENOSYS, b""
"""The answer to an operation that a file system does not have."""
NOT_FOUND: Answer = errno.ENOENT, b""


class ServedFiles(ABC):
    """A file system at `folder`, which is made; `answered` is called for each request, on a thread of its own.

    SOURCE: by which /proc/mounts names it. OSError says why it cannot be mounted.
    """

    SOURCE: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._device = -1
        self._using_device = threading.Lock()

    @abstractmethod
    def answered(self, request: Request) -> Answer | None:
        """Return the answer; None for none, or for one that `answer` gives later."""

    def __enter__(self) -> Self:
        # A child of vfork closes what its parent has open, of which this file system is asked, while the parent waits
        # with its interpreter locked: nobody would answer.
        subprocess._USE_VFORK = False  # type: ignore[misc]  # Python's documentation says that it may be set
        source, folder = self.SOURCE.encode(), os.fsencode(self.folder)
        with contextlib.ExitStack() as stack:
            self.folder.mkdir(parents=True)
            stack.callback(self.folder.rmdir)
            device = os.open("/dev/fuse", os.O_RDWR)
            stack.callback(os.close, device)
            options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
            self._call("mount", source, folder, b"fuse", _NODEV_NOSUID, options.encode())
            self._device = device
            stack.callback(self.release)
            threading.Thread(target=self._serve, args=(device,), name=f"{self.SOURCE}-files", daemon=True).start()
            stack.pop_all()  # from here on that thread closes the device, and `__exit__` does the rest
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def release(self) -> None:
        """End all waits, with an error for who waits, and the file system itself. Idempotent."""
        with self._using_device:
            mounted, self._device = self._device >= 0, -1
        if mounted:
            self._call("umount2", os.fsencode(self.folder), _FORCE | _DETACH)

    def answer(self, unique: int, error: int, data: bytes = b"") -> None:
        """Answer a request now that had none so far; nothing if it was taken back, or all of them have ended."""
        with self._using_device:
            if self._device >= 0:
                _send(self._device, unique, error, data)

    def _call(self, name: str, *arguments: object) -> None:
        if getattr(self._libc, name)(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fsdecode(self.folder))

    def _serve(self, device: int) -> None:
        while True:
            try:
                read = os.read(device, _MOST)
            except OSError:
                break  # it was unmounted
            _, operation, unique, node = _HEADER.unpack_from(read)[:4]
            request = Request(operation=operation, unique=unique, node=node, given=read[_HEADER.size :])
            answer = self._answered(request)
            if answer is not None:
                _send(device, unique, *answer)
        os.close(device)

    def _answered(self, request: Request) -> Answer | None:
        match request.operation:
            case Operation.INIT:
                flags = struct.unpack_from("<IIII", request.given)[3] & _ASYNC_READ
                return 0, struct.pack("<IIIIHHIIHHI7I", 7, 31, 1 << 16, flags, 12, 9, 1 << 16, 1, 16, 0, 0, *[0] * 7)
            case Operation.RELEASE | Operation.FLUSH:
                return 0, b""
            case Operation.FORGET | Operation.BATCH_FORGET | Operation.INTERRUPT:
                return None  # these have no answer
            case _:
                return self.answered(request)


def _send(device: int, unique: int, error: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(device, _ANSWER.pack(_ANSWER.size + len(data), -error, unique) + data)


def entry(node: int, size: int, *, valid: int) -> Answer:
    """Return the answer to LOOKUP: the file's number and bytes, which the kernel remembers for `valid` seconds."""
    return 0, struct.pack("<QQQQII", node, 0, valid, valid, 0, 0) + _attributes(node, size)


def attributes(node: int, size: int, *, valid: int) -> Answer:
    """Return the answer to GETATTR, as `entry`; the folder has no size."""
    return 0, struct.pack("<QII", valid, 0, 0) + _attributes(node, size)


def opened(*, direct: bool = False) -> Answer:
    """Return the answer to OPEN. direct: the kernel keeps nothing of what it reads."""
    return 0, struct.pack("<QII", 1, int(direct), 0)


def taken(size: int) -> Answer:
    """Return the answer to WRITE: how many bytes of it were written."""
    return 0, struct.pack("<II", size, 0)


def _attributes(node: int, size: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    size = 0 if node == ROOT else size
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)
