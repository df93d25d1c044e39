"""The process that writes one keeper's event file: `python -I -S event_file.py FILE LIMIT`, with lines on stdin.

A thread that waits for a disk which does not answer keeps its process from ending, whatever signal it is sent. So the
writes are not the keeper's own: nobody waits for this process, which ends when its stdin does. stdout has a line for
the opening of the file and one for each line that was taken: empty where it was written, else the number of an error,
what it is, and of which file, as a JSON list.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import sys
import threading

PATIENCE = 5.0
"""Seconds that the last line has to be written once nobody reads the answers any more."""


class EventFile:
    """The file, every line of which is one write: O_APPEND keeps whole lines apart.

    A line that was only partly written, be it by an earlier process, is ended at the next one, and readers pass over
    it. limit: bytes that it may take with `<name>.1`, to which it is renamed past half of them, replacing an older one.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file, self._size = -1, 0
        self._torn = False

    def open(self) -> None:
        """Make the file, and its folder; OSError."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        self._file = self._opened()
        self._size = os.fstat(self._file).st_size
        self._torn = self._size > 0 and self._last() != b"\n"

    def write(self, line: bytes) -> None:
        """Write a line; OSError where it is not there as a whole."""
        if self._file < 0:
            self.open()
        line = b"\n" * self._torn + line
        if self._size and self._size + len(line) > self._limit // 2:
            self._rotate()
        written = os.write(self._file, line)
        self._size += written
        self._torn = written < len(line)
        if self._torn:
            raise OSError(errno.EIO, "half a line was written")

    def _last(self) -> bytes:
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read()
        return b""

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _rotate(self) -> None:
        # Until that works no line is short enough for the old file, of which nobody may know any more.
        self._size = self._limit
        # It may be gone: removed by somebody, or renamed already when no other could be made in its place.
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, self._path + ".1")
        fresh = self._opened()
        os.close(self._file)
        self._file, self._size = fresh, 0


def _end_with_keeper(done: threading.Event) -> None:
    keeper = select.poll()
    keeper.register(0, 0)
    keeper.poll()
    if not done.wait(PATIENCE):
        os._exit(1)


def _answer(error: OSError | None) -> None:
    said = "" if error is None else json.dumps([error.errno or errno.EIO, error.strerror or str(error), error.filename])
    os.write(1, said.encode() + b"\n")


def main(path: str, limit: int) -> None:
    """Write what stdin brings until it ends."""
    # Whoever ends a node sends signals to all of its processes, and the keeper has something to say yet.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    done = threading.Event()
    threading.Thread(target=_end_with_keeper, args=(done,), daemon=True).start()
    file = EventFile(path, limit)
    try:
        file.open()
        _answer(None)
    except OSError as error:
        _answer(error)
    for line in sys.stdin.buffer:
        failed = None
        try:
            file.write(line)
        except OSError as error:
            failed = error
        _answer(failed)
    done.set()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1], int(sys.argv[2]))
