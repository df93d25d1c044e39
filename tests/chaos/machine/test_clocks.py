"""A node has a wall clock of its own, which jumps for all its processes, and no other clock does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.faults.catalogue import lacking
from chaos.faults.clock import ClockJump
from chaos.faults.fault import Need
from chaos.faults.moment import When
from chaos.history.follow import Follower
from chaos.machine.clocks import Clocks, righted
from chaos.machine.processes import leashed
from elastic3d.errors import UsageError

CLOCK = """
import json, os, sys, time
for line in sys.stdin:
    child = os.fork()
    clocks = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_REALTIME), time.time_ns() / 1e9
    if not child:
        print(json.dumps(clocks), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
WAIT = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]
mutex, condition = (ctypes.c_char * 64)(), (ctypes.c_char * 64)()
libc.pthread_mutex_lock(mutex)
until = int(time.time()) + 1800
print("waits", flush=True)
while (code := libc.pthread_cond_timedwait(condition, mutex, ctypes.byref(Time(until, 0)))) == 0:
    pass
print(code, flush=True)
"""


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    if why := lacking(Need.COMPILER):
        pytest.skip(why)
    with Clocks() as clocks:
        yield clocks


def started(clocks: Clocks, node: str, text: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        leashed([sys.executable, "-c", text]),
        env={**os.environ, **clocks.environment(node)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_wall_clock_of_one_node_jumps(clocks: Clocks) -> None:
    """Forwards, then back past where it was, also for what it has forked; others, and monotonic clocks, go on."""
    with started(clocks, "node0", CLOCK) as one, started(clocks, "node1", CLOCK) as other:
        for jump, off in ((0.0, 0.0), (3600.0, 3600.0), (-7200.0, -3600.0)):
            clocks.shift("node0", jump)
            for process, expected in ((one, off), (other, 0.0)):
                wall, monotonic, same, ns = shown(process)
                assert wall - time.time() == pytest.approx(expected, abs=30)
                assert (same, ns) == pytest.approx((wall, wall), abs=1)
                assert monotonic == pytest.approx(time.monotonic(), abs=30)
        for process in (one, other):
            process.communicate("")


def shown(process: subprocess.Popen[str]) -> list[float]:
    """Return what the clocks show of a child of a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("now\n")
    process.stdin.flush()
    clocks: list[float] = json.loads(process.stdout.readline())
    return clocks


def test_a_wait_until_a_wall_time_ends_when_the_clock_jumps_there(clocks: Clocks) -> None:
    """As it does in the kernel; of half an hour half a second is left."""
    with started(clocks, "node0", WAIT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        began = time.monotonic()
        clocks.shift("node0", 3600.0)
        assert process.stdout.readline() == "110\n"  # ETIMEDOUT
        assert time.monotonic() - began < 60


def test_events_are_read_by_this_machines_clock(tmp_path: Path) -> None:
    """Whatever the clock of the node showed that wrote them, which may have jumped between two of them."""
    assert righted(1000.0, (), 1000.1) == 1000.0
    assert righted(4600.0, (3600.0,), 1000.1) == 1000.0
    assert righted(999.0, (3600.0,), 1000.1) == 999.0
    assert righted(-2600.0, (3600.0, -7200.0), 1000.1) == 1000.0
    lines = [{"event": "a", "at": 4600.0, "node": "node1"}, {"event": "b", "at": 1001.0, "node": "node0"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    jumps = {"node1": (3600.0,)}
    follower = Follower(tmp_path, lambda node, at: righted(at, jumps.get(node, ()), 1002.0))
    assert [(event.name, event.at) for event in follower.poll()] == [("a", 1000.0), ("b", 1001.0)]


def test_nothing_is_left(clocks: Clocks) -> None:
    """Its folder goes with it."""
    (library, *_) = clocks.environment("node0")["LD_PRELOAD"].split()
    assert Path(library).exists()
    clocks.close()
    assert not Path(library).parent.exists()


@pytest.mark.parametrize("seconds", [0.0, 59.0, -5.0, 1e6, float("nan")])
def test_what_is_no_jump_of_a_clock_is_refused(seconds: float) -> None:
    """Too little to be told, or to before the build."""
    with pytest.raises(UsageError, match="seconds= is from 60 to 86400, or as many below 0"):
        ClockJump(node="leader", when=When(step=3), seconds=seconds).check()
    ClockJump(node="leader", when=When(step=3), seconds=-3600.0).check()
