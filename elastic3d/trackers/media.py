"""Where lines are kept: a file that another process can take over, or an object that is written whole.

A file is taken over by putting a copy in its place (`rename`), which only the new writer has open. Whatever the former
one still writes - it may have stood still, and not know that it was replaced - goes to a file without a name. If it
stood still while it took over itself, the name of its own copy is gone. So there are never two writers of one file, on
any file system on which rename is atomic. A writer that finds another file in its place begins anew with `take`.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from elastic3d.clock import SYSTEM
from elastic3d.errors import TrackerError

T = TypeVar("T")

Copy = Callable[[BinaryIO, BinaryIO], T]
"""Copies from the first what is to stay to the second, and returns what it learnt."""

LEAST = 10.0
"""Seconds from one writing of an object to the next, at least."""

SHARE = 20
"""An object is not written more often than that this takes one part in so many of the time."""


class Medium(Protocol):
    """Where lines are kept. Errors are OSError, TrackerError, or what the store raises."""

    def take(self, copy: Copy[T]) -> T:
        """Be the only writer from now on, of what `copy` leaves of what is there."""
        ...

    def append(self, data: bytes) -> None:
        """Write at the end, and return when it is there for others."""
        ...

    def set_aside(self) -> str:
        """Keep what is there under another name, which is returned, and begin with nothing."""
        ...

    def release(self) -> None:
        """Write no more."""
        ...

    @property
    def every(self) -> float:
        """Seconds from one `append` to the next."""
        ...


class FileMedium:
    """A file on a local or a shared disk. Folders are made."""

    every = 1.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.FileIO | None = None

    def take(self, copy: Copy[T]) -> T:
        """Put a copy in the place of the file, and keep it open for `append`."""
        self.release()
        self.path = path = self.path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise TrackerError(f"{path} is no file: name another one")
        for left in path.parent.glob(f".{_escaped(path.name)}.*{_COPY}"):
            left.unlink(missing_ok=True)
        copied = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_COPY}")
        file = open(copied, "xb", buffering=0)  # noqa: SIM115  # it stays open
        try:
            with open(path, "rb") if path.exists() else io.BytesIO() as old:
                new = io.BufferedWriter(file, 1 << 20)
                try:
                    result = copy(old, new)
                    new.flush()
                finally:
                    new.detach()
            if path.exists():
                shutil.copymode(path, copied)
            os.fsync(file.fileno())
            os.rename(copied, path)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                copied.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
        self._file = file
        return result

    def append(self, data: bytes) -> None:
        """Write at the end and to the disk; TrackerError if the file is no longer the one of that name."""
        assert self._file is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())
        mine, there = os.fstat(self._file.fileno()), os.stat(self.path)
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise TrackerError(f"another process has replaced {self.path}")

    def set_aside(self) -> str:
        """Rename the file to the first free one of `name.1.csv`, `name.2.csv`..."""
        self.release()
        number = 1
        while (aside := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        os.rename(self.path, aside)
        return str(aside)

    def release(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


class ObjectMedium:
    """An object of any store that fsspec knows: it is written whole, more and more seldom as it grows.

    Who writes it last has it. A writer puts there all that it has taken over and written, so that what a former one
    still puts over it is put right by the next `append`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._content = bytearray()
        self._took = 0.0

    @property
    def every(self) -> float:
        """Seconds from one writing to the next: `LEAST`, or longer if writing takes long."""
        return max(LEAST, SHARE * self._took)

    def take(self, copy: Copy[T]) -> T:
        """Read what is there."""
        system, path = self._system()
        old = io.BytesIO(system.cat_file(path) if system.exists(path) else b"")
        new = io.BytesIO()
        result = copy(old, new)
        self._content = bytearray(new.getvalue())
        return result

    def append(self, data: bytes) -> None:
        """Write all anew."""
        self._content += data
        system, path = self._system()
        began = SYSTEM.monotonic()
        system.pipe_file(path, bytes(self._content))
        self._took = SYSTEM.monotonic() - began

    def set_aside(self) -> str:
        """Copy the object to the first free name of `name.1.csv`, `name.2.csv`..."""
        system, path = self._system()
        stem, dot, suffix = path.rpartition(".")
        number = 1
        while system.exists(aside := f"{stem}.{number}{dot}{suffix}" if dot else f"{path}.{number}"):
            number += 1
        system.copy(path, aside)
        self._content.clear()
        return aside

    def release(self) -> None:
        """Keep nothing."""
        self._content.clear()

    def _system(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(self.url, use_listings_cache=False)
        return system, str(path)


_COPY = ".taken"


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _sync_folder(folder: Path) -> None:
    """Bring the folder's names to the disk, where its file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
