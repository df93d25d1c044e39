"""Processes that are stopped for some seconds, by a program that is none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from chaos.machine.processes import children, wait_until
from elastic3d.clock import SYSTEM
from elastic3d.health.processes import stat_fields
from elastic3d.worker.processes import stopping

FAMILY = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])\n"
    "child.wait()\n"
)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", *arguments])
    try:
        yield process
    finally:
        below = stopping.below(process.pid)
        for pid in reversed(below):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait()


def state(pid: int) -> str:
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def stopped(pids: list[int]) -> bool:
    return all(state(pid) == "T" for pid in pids)


def running(pids: list[int]) -> bool:
    return all(state(pid) in ("S", "R") for pid in pids)


def test_a_process_and_all_below_it_stand_still_and_go_on() -> None:
    """The parent as well as its child, for the time that is given."""
    with started("-c", FAMILY) as parent:
        assert wait_until(lambda: len(children(parent.pid)) == 1, 20.0)
        pids = [parent.pid, *children(parent.pid)]
        begun = SYSTEM.monotonic()
        with started(stopping.__file__, "1", "--below", str(parent.pid)) as program:
            assert wait_until(lambda: stopped(pids), 20.0)
            assert program.wait(20) == 0
        assert SYSTEM.monotonic() - begun >= 1.0
        assert wait_until(lambda: running(pids), 5.0)


def test_a_program_below_what_it_stops_goes_on_itself() -> None:
    """As a keeper's child it is one of the node's processes, and has to wake the others."""
    keeper = (
        "import os, subprocess, sys\n"
        f"argv = [sys.executable, '-I', '-S', {stopping.__file__!r}, '0.5', '--below', str(os.getpid())]\n"
        "sys.exit(subprocess.call(argv, start_new_session=True))\n"
    )
    with started("-c", keeper) as process:
        assert process.wait(20) == 0


def test_nothing_is_left_of_it_once_they_are_killed() -> None:
    """It ends with the last of them, long before its time."""
    with started("-c", "import signal; signal.pause()") as process:
        with started(stopping.__file__, "600", str(process.pid)) as program:
            assert wait_until(lambda: stopped([process.pid]), 20.0)
            process.kill()
            assert program.wait(20) == 0


def test_a_process_that_is_gone_is_passed_over() -> None:
    """Its number is nobody's, or the program would have waited."""
    with started("-c", "pass") as process:
        process.wait()
        with started(stopping.__file__, "600", str(process.pid)) as program:
            assert program.wait(20) == 0
