"""Train like `train_soak`, in a keeper that leaks: half a megabyte and a descriptor twice a second."""

from __future__ import annotations

import os
import signal

from chaos.scripts.train_soak import start

_kept: list[bytes] = []


def leak(number: int, frame: object) -> None:
    """Keep more."""
    _kept.append(os.urandom(1 << 19))
    os.open(os.devnull, os.O_RDONLY)


if __name__ == "__main__":
    # A timer is not inherited by forks: templates and trainers do not leak. A thread would forbid the forks.
    signal.signal(signal.SIGALRM, leak)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    start()
