"""Let a node's trainers have less of a processor than they would use: the quota of a cgroup, where root may make one.

Elsewhere they are stopped and woken by turns. Either way what they compute is the same, and takes longer.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.machine.processes import send
from elastic3d.clock import SYSTEM

CGROUPS = Path("/sys/fs/cgroup")
PERIOD = 0.05
"""Seconds of one turn, where processes are stopped and woken."""

AGAIN = 0.2
"""Seconds between two looks at which trainers there are."""


class Throttle:
    """From `start` to `close` the processes that `pids` returns have a share of one processor.

    quota: whether by the quota of a cgroup. Called on one thread; `pids` is called on another one.
    """

    def __init__(self, pids: Callable[[], Sequence[int]], share: float) -> None:
        assert 0 < share < 1, share
        self._pids, self._share = pids, share
        self._group: Path | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    @property
    def quota(self) -> bool:
        """Whether it is the quota of a cgroup, and not stops by turns."""
        return self._group is not None

    def start(self) -> None:
        """Begin."""
        self._group = _make_group(self._share)
        self._thread.start()

    def close(self) -> None:
        """Let them have what they want again."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._group is not None:
            try:
                while not self._over.wait(AGAIN):
                    for pid in self._pids():
                        _move(pid, self._group)
            finally:
                _remove(self._group)
            return
        while not self._over.is_set():
            pids = self._pids()
            send(pids, signal.SIGSTOP)
            SYSTEM.sleep(PERIOD * (1 - self._share))
            send(pids, signal.SIGCONT)
            SYSTEM.sleep(PERIOD * self._share)


def _make_group(share: float) -> Path | None:
    """Return a new cgroup with a quota, of either version; None where none can be made."""
    name = f"elastic3d-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    microseconds = round(share * 100_000)
    for parent, file, text in (
        (CGROUPS, "cpu.max", f"{microseconds} 100000"),
        (CGROUPS / "cpu", "cpu.cfs_quota_us", str(microseconds)),
    ):
        group = parent / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / file).exists():
                (group / file).write_text(text)
                return group
        except OSError:
            pass
        group.rmdir()
    return None


def _move(pid: int, group: Path) -> None:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        pass  # it has ended


def _remove(group: Path) -> None:
    for _ in range(50):
        for pid in (group / "cgroup.procs").read_text().split():
            _move(int(pid), group.parent)
        try:
            group.rmdir()
        except OSError:  # one of them is about to end
            SYSTEM.sleep(0.1)
        else:
            return
