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
    """Until `close` the processes that `pids` returns have a share of the time, in turns of `period` seconds.

    Called on one thread; `pids` is called on another one. Who is no longer returned when a turn ends is not woken.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], share: float, *, period: float = PERIOD) -> None:
        assert 0 < share < 1, share
        self._pids, self._share, self._period = pids, share, period
        self._over = threading.Event()
        self._thread = threads.start(self._run, name="throttle", edge=threads.Edge.ALONE)

    def close(self) -> None:
        """Let them have what they want again."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            stopped = self._pids()
            send(stopped, signal.SIGSTOP)
            SYSTEM.sleep(self._period * (1 - self._share))
            wanted = set(self._pids())
            send([pid for pid in stopped if pid in wanted], signal.SIGCONT)
            SYSTEM.sleep(self._period * self._share)
