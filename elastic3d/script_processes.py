"""Processes in which commands run a user's script with a question in its environment, instead of training it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from elastic3d import environment

LINES = 12
"""Most lines of a script's output that an error quotes."""

ScriptProcess = subprocess.Popen[bytes]


def start(script: str, arguments: Sequence[str], question: Mapping[str, str], output: BinaryIO) -> ScriptProcess:
    """Start a script in a process group of its own, which `end` ends. question: variables; output: for what it says."""
    variables = {
        **os.environ,
        **question,
        environment.THREADS.name: environment.THREADS.read(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return subprocess.Popen(
        [sys.executable, script, *arguments],
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(process: ScriptProcess) -> None:
    """Kill a script with all that it has started, if it has not ended, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_ended(code: int) -> str:
    """Say in words how a script ended that gave no answer."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "ended without calling elastic3d.run"


def last_lines(said: Path) -> str:
    """Return what a script said last, as the end of an error; "" for nothing."""
    lines = said.read_text(errors="replace").strip().splitlines()[-LINES:]
    return "\nIt said last:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
