"""A process that is throttled computes for a share of the time, and for all of it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.machine import throttle
from chaos.machine.processes import leashed
from chaos.machine.throttle import Throttle


@pytest.mark.parametrize("group", [True, False])
def test_a_throttled_process_has_its_share(group: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a quota where one can be had, and by turns where none can; nothing is left."""
    if not group:
        monkeypatch.setattr(throttle, "CGROUPS", tmp_path / "none")
    with subprocess.Popen(leashed([sys.executable, "-c", "while True: pass"])) as process:
        try:
            limit = Throttle(lambda: [process.pid], 0.2)
            limit.start()
            time.sleep(0.5)
            used = share_of(process.pid, 1.5)
            limit.close()
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        finally:
            process.kill()
    assert used < 0.3
    assert group or not limit.quota
    assert state not in "Tt"
    assert not [*throttle.CGROUPS.glob(f"**/elastic3d-{os.getpid()}-*")]


def share_of(pid: int, seconds: float) -> float:
    """Return the share of a processor that a process has for some seconds."""
    ticks = [ticks_of(pid)]
    began = time.monotonic()
    time.sleep(seconds)
    ticks.append(ticks_of(pid))
    return (ticks[1] - ticks[0]) / 100 / (time.monotonic() - began)


def ticks_of(pid: int) -> int:
    """Return a process's hundredths of a second of computing."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
