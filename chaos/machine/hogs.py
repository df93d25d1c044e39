"""Processes that compute beside a job, and take its processors from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from chaos.machine.processes import leashed


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Have `count` processes for each processor compute for as long as the context is open."""
    running = [
        subprocess.Popen(leashed([sys.executable, "-c", "while True: pass"]))
        for _ in range(count * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
