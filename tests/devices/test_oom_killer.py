"""A process that the kernel killed for its memory is told from one that somebody killed, by its group's count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.groups import NodeGroup, parents
from chaos.machine.processes import leashed, wait_until
from elastic3d.devices.oom_killer import SCORE, KillCount, be_killed_first

HOLDS = """
import sys
held = b"x" * (int(sys.argv[1]) << 20)
print("held", flush=True)
sys.stdin.readline()
more = b"x" * (30 << 20)
sys.stdin.readline()
"""
TRAINS = f"with open('/proc/self/oom_score_adj', 'w') as file:\n    file.write('{SCORE}')\n{HOLDS}"
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"


def machine(folder: Path, groups: str, mounts: dict[str, tuple[str, str]]) -> Path:
    """Write what the kernel says of process 7: its groups, and mounts by folder as (type, options)."""
    (folder / "proc" / "7").mkdir(parents=True)
    (folder / "proc" / "7" / "cgroup").write_text(groups)
    lines = [f"{kind} {folder / where} {kind} {options} 0 0\n" for where, (kind, options) in mounts.items()]
    (folder / "proc" / "7" / "mounts").write_text("proc /proc proc rw 0 0\n" + "".join(lines))
    for where in mounts:
        (folder / where).mkdir()
    return folder / "proc"


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_in_the_group_is_seen_and_one_before_is_not(tmp_path: Path, version: int) -> None:
    """With its limit, which says how much there was."""
    if version == 1:
        proc = machine(
            tmp_path, "4:memory:/job/node\n1:cpu:/\n", {"m": ("cgroup", "rw,memory"), "c": ("cgroup", "rw,cpu")}
        )
        file, text = tmp_path / "m/job/node/memory.oom_control", V1_CONTROL
        put(file.parent / "memory.limit_in_bytes", "200000000\n")
    else:
        proc = machine(tmp_path, "0::/job/node\n", {"u": ("cgroup2", "rw")})
        file, text = tmp_path / "u/job/node/memory.events", V2_EVENTS
        put(file.parent / "memory.max", "200000000\n")
    put(file, text.format(3))
    count = KillCount.of(7, proc)
    assert (count.file, count.kills, count.limit()) == (file, 3, 200_000_000)
    assert not count.killed_since()
    file.write_text(text.format(4))
    assert count.killed_since()


def test_a_containers_group_is_at_the_mounts_root(tmp_path: Path) -> None:
    """Its path names what is outside; the nearest folder that counts is taken."""
    proc = machine(tmp_path, "4:memory:/outside/4711\n0::/\n", {"m": ("cgroup", "rw,memory")})
    file = put(tmp_path / "m/memory.oom_control", V1_CONTROL.format(0))
    assert KillCount.of(7, proc).file == file


@pytest.mark.parametrize("limit", ["max\n", str(1 << 63), ""])
def test_a_group_without_a_limit_has_none(tmp_path: Path, limit: str) -> None:
    """Version 2 says "max", version 1 a number beyond all machines."""
    proc = machine(tmp_path, "0::/\n", {"u": ("cgroup2", "rw")})
    put(tmp_path / "u/memory.events", V2_EVENTS.format(0))
    put(tmp_path / "u/memory.max", limit)
    assert KillCount.of(7, proc).limit() == 0


def test_where_nothing_counts_nothing_is_said(tmp_path: Path) -> None:
    """A machine without control groups, a group that is gone, or a process that is."""
    assert not KillCount.of(7, tmp_path).killed_since()
    proc = machine(tmp_path, "0::/\n", {"u": ("cgroup2", "rw")})
    assert KillCount.of(7, proc).file is None
    file = put(tmp_path / "u/memory.events", V2_EVENTS.format(0))
    count = KillCount.of(7, proc)
    file.unlink()
    assert not count.killed_since()


def test_this_machine_is_read_as_it_is() -> None:
    """Whatever it has: nobody is killed meanwhile."""
    assert not KillCount.of(os.getpid()).killed_since()


@pytest.mark.parametrize("before", ["0", "-998", "938"])
def test_a_trainer_is_killed_before_its_keeper(tmp_path: Path, before: str) -> None:
    """Whatever both have from whoever started them, as Kubernetes gives pods 938."""
    score = put(tmp_path / "oom_score_adj", before)
    be_killed_first(score)
    assert score.read_text() == SCORE
    be_killed_first(tmp_path / "none" / "oom_score_adj")


def test_the_kernel_kills_the_smaller_process_that_is_to_be_killed_first() -> None:
    """A keeper holds more than its trainer does, by more than half of what their control group may have.

    It is the trainer that asks for more: while a killed process gives its memory back, the kernel no longer sees it
    among the group's, and kills another one where that asks meanwhile (once in 36 with a keeper that asked).
    """
    group = NodeGroup.made(parents())
    if group.memory is None:
        group.remove()
        pytest.skip("no control group can bound memory here")
    assert group.limit(200 << 20)
    try:
        with (
            subprocess.Popen(leashed([sys.executable, "-c", HOLDS, "150"], group.entries), **PIPES) as keeper,
            subprocess.Popen(leashed([sys.executable, "-c", TRAINS, "20"], group.entries), **PIPES) as trainer,
        ):
            for process in (keeper, trainer):
                assert process.stdout is not None
                assert process.stdout.readline() == b"held\n"
            assert trainer.stdin is not None
            trainer.stdin.write(b"more\n")
            trainer.stdin.flush()
            assert trainer.wait(20) == -signal.SIGKILL
            assert keeper.poll() is None
            keeper.kill()
    finally:
        assert wait_until(group.remove, 5)
