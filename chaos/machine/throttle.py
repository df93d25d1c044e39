"""Let processes have less of a processor than they would use, without root: they are stopped and woken by turns."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence

from chaos.machine.processes import send
from elastic3d import threads
from elastic3d.clock import SYSTEM

PERIOD = 0.05
"""Seconds of one turn."""


class Throttle:
    """Until `close` the processes that `pids` returns have a share of the time.

    Called on one thread; `pids` is called on another one.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], share: float) -> None:
        assert 0 < share < 1, share
        self._pids, self._share = pids, share
        self._over = threading.Event()
        self._thread = threads.start(self._run, name="throttle", edge=threads.Edge.ALONE)

    def close(self) -> None:
        """Let them have what they want again."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            pids = self._pids()
            send(pids, signal.SIGSTOP)
            SYSTEM.sleep(PERIOD * (1 - self._share))
            send(pids, signal.SIGCONT)
            SYSTEM.sleep(PERIOD * self._share)
