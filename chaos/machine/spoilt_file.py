"""A file of a file system of its own that takes lines at its end, of which no write is answered, or each fails.

    with SpoiltFile(folder, kept) as file:
        log = os.open(file.path, os.O_WRONLY | os.O_APPEND)
        file.hang()     # who writes waits in state D, and cannot be killed
        file.restore()  # what was written arrives
        file.refuse()   # writes fail, as those to a device that was taken away
        file.restore()

Whatever becomes of writes, the file can be read all the time.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos.machine.fuse import (
    NOT_FOUND,
    ROOT,
    UNKNOWN,
    Answer,
    Operation,
    Request,
    ServedFiles,
    attributes,
    entry,
    opened,
    taken,
)


class SpoiltFile(ServedFiles):
    """A file system at `folder`, which is made, of one file: `path`. kept: the file that has its bytes, and stays.

    What `kept` has no room for, the writer is told of. OSError says why it cannot be mounted, or `kept` not be opened.
    """

    SOURCE = "spoilt"

    def __init__(self, folder: Path, kept: Path) -> None:
        super().__init__(folder)
        self.path = folder / kept.name
        self._kept = kept
        self._bytes = -1
        self._changing = threading.Lock()
        self._hangs = self._refuses = False
        self._held: list[Request] = []
        self._nodes = itertools.count(ROOT + 1)

    def __enter__(self) -> Self:
        self._bytes = os.open(self._kept, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._bytes)
            super().__enter__()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()
        super().__exit__(kind, error, traceback)
        with self._changing:
            os.close(self._bytes)
            self._bytes = -1

    @property
    def held(self) -> int:
        """Writes that were heard and wait for their answer."""
        return len(self._held)

    def hang(self) -> None:
        """Answer no write until `restore`."""
        with self._changing:
            self._hangs = True

    def refuse(self) -> None:
        """Let writes fail until `restore`."""
        with self._changing:
            self._refuses = True

    def restore(self) -> None:
        """Take writes again, those first that wait for their answer, in order. Idempotent."""
        with self._changing:
            self._hangs = self._refuses = False
            held, self._held = self._held, []
            for request in held:
                self.answer(request.unique, *self._appended(request))

    def answered(self, request: Request) -> Answer | None:
        """Return what is said of the file, whose bytes are never kept by the kernel.

        Each time that it is looked up it is another one to the kernel, which otherwise lets nobody close it, nor
        another one write to it, before a write is answered.
        """
        with self._changing:
            if self._bytes < 0:
                return errno.ENODEV, b""
            match request.operation:
                case Operation.LOOKUP if request.name == os.fsencode(self.path.name):
                    return entry(next(self._nodes), self._size(), valid=0)
                case Operation.LOOKUP:
                    return NOT_FOUND
                case Operation.GETATTR:
                    return attributes(request.node, self._size(), valid=0)
                case Operation.OPEN:
                    return opened(direct=True)
                case Operation.READ:
                    offset, size = request.span
                    return 0, os.pread(self._bytes, size, offset)
                case Operation.WRITE if self._hangs:
                    self._held.append(request)
                    return None
                case Operation.WRITE:
                    return (errno.EIO, b"") if self._refuses else self._appended(request)
                case _:
                    return UNKNOWN

    def _size(self) -> int:
        return os.fstat(self._bytes).st_size

    def _appended(self, request: Request) -> Answer:
        try:
            return taken(os.write(self._bytes, request.written))
        except OSError as error:
            return error.errno or errno.EIO, b""
