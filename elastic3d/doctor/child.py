"""Ask a program something in a process of its own: what hangs or crashes there cannot take this one along.

The child dies with its parent, has no terminal, and its whole group is killed when it is no longer waited for. A child
that the kernel does not let go of is left behind: it ends as soon as the kernel does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.doctor.running import CheckRun, Stopped

_LAUNCH = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): os._exit(85)
os.execvp(sys.argv[2], sys.argv[2:])
"""

TURN = 0.05
REAPED = 2.0
"""Seconds that a killed child is waited for."""

MOST = 1 << 20
"""Bytes of its output that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a program printed. code: its exit code, negative for a signal, None where it was not done in time."""

    output: str
    errors: str
    code: int | None


def ask(command: Sequence[str], run: CheckRun, *, limit: float) -> Said:
    """Run a program for at most `limit` seconds, or until it has said far too much, and return what it said."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        code = None
        ends = max(0.0, run.left - limit)
        try:
            while code is None and run.left > ends:
                try:
                    code = process.wait(TURN)
                except subprocess.TimeoutExpired:
                    run.go_on()
                    if max(os.fstat(file.fileno()).st_size for file in (output, errors)) > MOST:
                        break
        except Stopped:
            pass  # what it said until now is told all the same
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAPED)
        return Said(output=_read(output.fileno()), errors=_read(errors.fileno()), code=code)


def _read(file: int) -> str:
    return os.pread(file, MOST, 0).decode(errors="replace")
