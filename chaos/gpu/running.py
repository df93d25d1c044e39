"""Runs one stage as a process group of its own, passes its lines on as they come, and ends it at its limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from chaos.machine.processes import leashed, marked, send, wait_until
from elastic3d.clock import SYSTEM

MARK = "CHAOS_GPU_STAGE"
"""Environment variable that all processes of a stage carry, whatever groups they form."""

LEAVE = 2.0
"""Seconds in which helpers of a stage that has ended, such as a compiler's, see that and end too."""

GRACE = 10.0
"""Seconds in which processes of a stage that was killed must be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a stage ended: "ok", "over its limit", or what its process came to."""

    how: str
    seconds: float
    left: tuple[str, ...] = ()


def run_stage(
    command: Sequence[str],
    *,
    limit: float,
    mark: str,
    environment: Mapping[str, str],
    take: Callable[[str], None],
    log: BinaryIO,
) -> Ended:
    """Run a command for at most `limit` seconds; give each line of its output to `take` as soon as it is there.

    When this returns all its processes are gone; what they left running is named. log: takes its standard error.
    """
    began = SYSTEM.monotonic()
    process = subprocess.Popen(
        leashed(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        env={**environment, MARK: mark},
    )
    assert process.stdout is not None
    with process.stdout as stream:
        os.set_blocking(stream.fileno(), False)
        lines = _Lines(take)
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            over = False
            # A process that it left behind may hold the pipe open: its own end counts, not the pipe's.
            while process.poll() is None and not over:
                over = SYSTEM.monotonic() - began >= limit
                if selector.select(timeout=0.05) and not lines.read(stream):
                    SYSTEM.sleep(0.05)
        if over:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        lines.read(stream)
        lines.end()
    if not over:
        wait_until(lambda: not marked(mark, MARK), LEAVE)
    left = () if over else tuple(map(str, marked(mark, MARK)))
    _end_marked(mark)
    how = "over its limit" if over else "ok" if code == 0 else f"ended with {code}"
    return Ended(how=how, seconds=SYSTEM.monotonic() - began, left=left)


def _end_marked(mark: str) -> None:
    def gone() -> bool:
        left = marked(mark, MARK)
        send((process.pid for process in left), signal.SIGKILL)
        return not left

    wait_until(gone, GRACE)


class _Lines:
    """Cuts what is read into lines."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take, self._rest = take, b""

    def read(self, stream: BinaryIO | object) -> bool:
        """Take what is there; return whether more may come."""
        assert hasattr(stream, "fileno")
        while True:
            try:
                data = os.read(stream.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                self._take(line.decode(errors="replace"))

    def end(self) -> None:
        """Take a last line that was cut short."""
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
            self._rest = b""
