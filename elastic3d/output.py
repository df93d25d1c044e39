"""Text for people and lines for files, written so that the writer never waits for a reader.

A log reader that is stopped fills its pipe, one that died breaks it, a disk fills up, a file server hangs: none of this
may hold up a thread that decides something. So lines go through a bounded queue to a thread that only writes; lines
that do not fit are dropped and counted. Until `unblock` a process writes directly: a keeper may have no thread before
it has forked its template.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import BinaryIO, TextIO, cast

from elastic3d import environment, threads
from elastic3d.errors import ConfigurationError

MOST_BYTES = 8 << 20
"""Most bytes that may wait to be written."""

MOST_LINES = 20_000
"""Most lines that may wait to be written."""


class LineWriter:
    """Passes lines to `write` on its own thread, in order; `put` may be called from any thread and never blocks.

    write: takes one line, may block for any time, and must not raise. missed: called before the next line, on the same
    thread, with the number of lines dropped since the last one. The thread begins with the first line.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        *,
        name: str,
        missed: Callable[[int], None] = lambda count: None,
        most_bytes: int = MOST_BYTES,
        most_lines: int = MOST_LINES,
    ) -> None:
        self._write, self._missed, self._name = write, missed, name
        self._most_bytes, self._most_lines = most_bytes, most_lines
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = self._dropped = 0
        self._writing = self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> bool:
        """Have a line written; return False if it was dropped because too much is waiting or the writer is closed.

        From the writer's own thread, as in `missed`, it is written at once.
        """
        if threading.current_thread() is self._thread:
            self._write(line)
            return True
        with self._changed:
            full = len(self._lines) >= self._most_lines or self._bytes + len(line) > self._most_bytes
            if full or self._closed:
                self._dropped += 1
                return False
            self._lines.append(line)
            self._bytes += len(line)
            if self._thread is None:
                self._thread = threads.start(self._run, name=self._name, edge=threads.Edge.AGAIN)
            self._changed.notify_all()
            return True

    def flush(self, patience: float) -> bool:
        """Wait until all lines are written, at most `patience` seconds; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._lines and not self._writing, timeout=patience)

    def close(self, patience: float) -> bool:
        """Take no more lines; return whether all were written in `patience` seconds. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.flush(patience)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines) or self._closed)
                if not self._lines:
                    return
                line = self._lines.popleft()
                self._bytes -= len(line)
                dropped, self._dropped = self._dropped, 0
                self._writing = True
            try:
                if dropped:
                    self._missed(dropped)
                self._write(line)
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()


# Output on stderr. One writer per process, like stderr.

_said: LineWriter | None = None


class Verbosity(StrEnum):
    """The values of `ELASTIC3D_LOG`."""

    DEBUG = "debug"
    """All events, a readable line each."""
    INFO = "info"
    """What people should know, a readable line each."""
    JSON = "json"
    """What people should know, one JSON object per line."""


def checked_verbosity() -> Verbosity:
    """Return the value of `ELASTIC3D_LOG`; ConfigurationError if it is invalid. For the beginning of a process."""
    text = environment.LOG.read()
    try:
        return Verbosity(text)
    except ValueError:
        raise ConfigurationError(
            f"{environment.LOG.name}={text}: give one of {', '.join(Verbosity)}, or leave it unset for info"
        ) from None


def verbosity() -> Verbosity:
    """Return the value of `ELASTIC3D_LOG`, INFO if it is invalid: messages are shown then."""
    text = environment.LOG.read()
    return Verbosity(text) if text in tuple(Verbosity) else Verbosity.INFO


def say(text: str) -> None:
    """Write `elastic3d: ` and the text on stderr, as separate lines: text that belongs to no event.

    Never raises; never blocks after `unblock`. Under `ELASTIC3D_LOG=json` they are the `text` of an object.
    """
    as_json = verbosity() is Verbosity.JSON
    show(json.dumps({"event": None, "level": "info", "text": text}) if as_json else f"elastic3d: {text}")


def show(text: str) -> None:
    """Write the text on stderr as it is, as separate lines. Never raises; never blocks after `unblock`."""
    line = f"{text}\n".encode(errors="replace")
    if _said is not None:
        _said.put(line)
    else:
        _to_stderr(line)


def unblock() -> None:
    """Write from a thread from now on. Idempotent; after a fork the child writes directly again."""
    global _said
    if _said is None:
        _said = LineWriter(_to_stderr, name="elastic3d-said", missed=_missed, most_lines=2000)


def flush(patience: float) -> bool:
    """Wait until all output is written, at most `patience` seconds; return whether it is."""
    return _said is None or _said.flush(patience)


def _missed(count: int) -> None:
    say(f"{count} lines were dropped: the reader of this output was too slow")  # on the writer's thread: at once


def _to_stderr(line: bytes) -> None:
    """Write past Python's buffers: a thread that blocks in one of them would block its other users, and the exit."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        descriptor = -1
    try:
        if descriptor < 0:
            sys.stderr.write(line.decode())
            return
        while line:
            line = line[os.write(descriptor, line) :]
    except (OSError, ValueError):
        pass  # nobody reads it, or there is no room for it


def _forget() -> None:
    global _said
    _said = None


os.register_at_fork(after_in_child=_forget)


# Output of the user's code.


class _Surviving(io.RawIOBase):
    """A descriptor whose writes never fail: if nobody reads it or a disk is full, the output is lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream  # kept, since it would close the descriptor when collected
        self._descriptor = stream.fileno()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int | None:
        view = memoryview(data)  # type: ignore[arg-type]  # any buffer, as io.RawIOBase says
        try:
            return os.write(self._descriptor, view)
        except BlockingIOError:
            return None
        except OSError:
            return view.nbytes


def survive_readers() -> None:
    """Make `print` outlive its readers: a broken pipe or a full disk is not the user code's error. Idempotent.

    Streams that somebody else replaced, or that are closed, stay as they are.
    """
    sys.stdout = _surviving(sys.stdout)
    sys.stderr = _surviving(sys.stderr)


def _surviving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    buffer: object = stream.buffer  # under `python -u` the file itself
    buffered = isinstance(buffer, io.BufferedWriter)
    if not isinstance(buffer.raw if isinstance(buffer, io.BufferedWriter) else buffer, io.FileIO):
        return stream
    try:
        stream.flush()
    except (OSError, ValueError):
        pass
    survivor = _Surviving(stream)
    return io.TextIOWrapper(
        cast(BinaryIO, io.BufferedWriter(survivor) if buffered else survivor),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
