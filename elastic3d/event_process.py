"""The keeper's end of the process that writes its event file (event_file.py)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from elastic3d import event_file


class EventProcess:
    """Have lines written to the event file at `path`, by a process that is started anew where it was killed.

    limit: as `EventFile`. All methods but `close` on one thread at a time.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._arguments = [os.path.abspath(path), str(limit)]
        self._process: subprocess.Popen[bytes] | None = None
        self._opening = False

    def open(self, patience: float) -> None:
        """Start the process; OSError where it says within `patience` seconds that the file cannot be made.

        Where the process does not start, or is killed before it says so, the next line has it tried again.
        """
        with contextlib.suppress(BrokenPipeError):
            self._start()
            assert self._process is not None
            assert self._process.stdout is not None
            if select.select([self._process.stdout], [], [], patience)[0]:
                self._opening = False
                try:
                    self._answer()
                except OSError:
                    self.close(patience)
                    raise

    def write(self, line: bytes) -> None:
        """Return once a line, with its newline, is written; OSError where it is not. May block for any time."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            while line:
                line = line[self._process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            self._ended()
        if self._opening:
            # Where that failed it is tried again with the line, whose answer says so.
            self._opening = False
            self._said()
        self._answer()

    def close(self, patience: float) -> None:
        """End the process; after `patience` seconds it is left to end by itself. Only while nothing is written."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.returncode = 0  # nobody is to ask for it any more

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(event_file.__file__)), *self._arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # Else it would end with the keeper's group; the leader of a session is a template.
                process_group=0,
            )
        except OSError as error:
            raise _unwritten(f"cannot be started: {error.strerror}") from error
        self._opening = True

    def _answer(self) -> None:
        said = self._said()
        if said.strip():
            number, why, path = json.loads(said)
            raise OSError(number, why, path)

    def _said(self) -> bytes:
        """Return the next answer; OSError where there is none any more."""
        assert self._process is not None
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if not said.endswith(b"\n"):
            self._ended()
        return said

    def _ended(self) -> NoReturn:
        self.close(1.0)
        raise _unwritten("has ended")


def _unwritten(why: str) -> BrokenPipeError:
    """Return the error of the process, as opposed to one of its file, which it says itself."""
    return BrokenPipeError(errno.EPIPE, f"the process that writes it {why}")
