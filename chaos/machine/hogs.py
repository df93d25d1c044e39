"""Processes that compute beside a job, and take its processors from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from chaos.machine.processes import leashed

NICE = 7
"""Of each of them: a node, which is one control group and counts as one process, waited for seconds with all of it
ready to run beside three processes of nice 0. Beside those of nice 7 it counts as about five."""


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Have `count` processes for each processor compute for as long as the context is open."""
    running = [
        subprocess.Popen(leashed([sys.executable, "-c", f"import os; os.nice({NICE})\nwhile True: pass"]))
        for _ in range(count * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
