"""A node's processes have a share of the time and so much memory, and its control group goes with them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.groups import NodeGroup, enter, groups_left, parents
from chaos.machine.processes import leashed, wait_until
from chaos.machine.throttle import Throttle

SPIN = [sys.executable, "-c", "while True: pass"]
MAKER = """
import time
from chaos.machine.groups import NodeGroup, parents
print(*NodeGroup.made(parents()).folders, flush=True)
time.sleep(600)
"""


@pytest.fixture
def group() -> Iterator[NodeGroup]:
    """Make a group of this machine; skip where none of both kinds can be made."""
    made = NodeGroup.made(parents())
    if made.cpu is None or made.memory is None:
        made.remove()
        pytest.skip("no control group can be made here")
    yield made
    assert wait_until(made.remove, 5)


def test_a_group_has_its_share_and_all_of_it_again(group: NodeGroup) -> None:
    """With all that its first process has started."""
    shell = ["/bin/sh", "-c", f"{sys.executable} -c 'while True: pass' & echo $!; wait"]
    with subprocess.Popen(leashed(shell, group.entries), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert {*group.pids()} == {process.pid, child}
            assert group.quota(0.2)
            time.sleep(0.3)
            assert share_of(child, 1.5) < 0.3
            assert group.quota(None)
            assert group_file(group, "cpu.cfs_quota_us", "cpu.max").split()[0] in ("-1", "max")
        finally:
            subprocess.run(["kill", "-9", *map(str, group.pids())], check=True)


def test_what_a_process_holds_is_counted_and_bounded(group: NodeGroup) -> None:
    """Beyond the limit the kernel kills."""
    code = "import sys; held = b'x' * (30 << 20); print('held', flush=True); sys.stdin.readline(); b'x' * (90 << 20)"
    command = leashed([sys.executable, "-c", code], group.entries)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert 30 << 20 < group.held() < 60 << 20
        assert group.limit(group.held() + (20 << 20))
        process.communicate(b"more\n")
        assert process.returncode == -9
    assert group.limit(None)


def test_by_turns_a_process_has_its_share_without_root() -> None:
    """And runs on afterwards."""
    with subprocess.Popen(leashed(SPIN)) as process:
        try:
            throttle = Throttle(lambda: [process.pid], 0.2)
            used = share_of(process.pid, 1.5)
            throttle.close()
            assert fields(process.pid)[0] not in "Tt"
        finally:
            process.kill()
    assert used < 0.3


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path) -> None:
    """A folder that is not the kernel's bounds nothing, and none is left."""
    for below in ({}, {"cpu": tmp_path, "memory": tmp_path}, {"cpu": tmp_path / "none"}):
        made = NodeGroup.made(below)
        assert (made.folders, made.entries, made.pids()) == ((), (), [])
        assert not made.quota(0.5)
        assert not made.limit(1 << 30)
        assert made.remove()
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("groups", "mounts", "found"),
    [
        pytest.param("4:memory:/a\n1:cpu,cpuacct:/\n0::/\n", "1c 1m 2", {"cpu": "1c", "memory": "1m/a"}, id="v1"),
        pytest.param("4:memory:/outside\n0::/\n", "1m 2", {"cpu": "2", "memory": "1m"}, id="both, in a container"),
        pytest.param("0::/user.slice\n", "2", {"cpu": "2", "memory": "2"}, id="v2"),
        pytest.param("", "", {}, id="none"),
    ],
)
def test_groups_are_made_below_the_own_ones(groups: str, mounts: str, found: dict[str, str], tmp_path: Path) -> None:
    """Of v1; the mount itself where the own path is not there."""
    kinds = {"1c": "cgroup rw,cpu,cpuacct", "1m": "cgroup rw,memory", "2": "cgroup2 rw"}
    lines = [f"x {tmp_path / at} {kinds[at]} 0 0\n" for at in mounts.split()]
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n" + "".join(lines))
    (tmp_path / "cgroup").write_text(groups)
    (tmp_path / "1m" / "a").mkdir(parents=True)
    assert parents(tmp_path) == {controller: tmp_path / folder for controller, folder in found.items()}


def test_the_groups_of_a_killed_maker_are_found_and_removed(group: NodeGroup) -> None:
    """Not those of one that lives; and one with processes in it is named."""
    with subprocess.Popen(leashed([sys.executable, "-c", MAKER]), stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        folders = [Path(folder) for folder in maker.stdout.readline().split()]
        assert groups_left([], parents(), 0) == []
        assert all(folder.exists() for folder in (*folders, *group.folders))
        entries = [folder / "cgroup.procs" for folder in folders]
        with subprocess.Popen(leashed(SPIN, entries)) as stray:
            assert wait_until(lambda: all(f"{stray.pid}" in entry.read_text().split() for entry in entries), 20)
            # Only now: whoever else plays a job on this machine removes empty groups of a dead maker, too.
            maker.kill()
            maker.wait()
            assert {f"control group {folder}" for folder in folders} <= {*groups_left([], parents(), 0)}
            stray.kill()
    assert wait_until(lambda: groups_left([], parents(), 0) == [], 5)
    assert not any(folder.exists() for folder in folders)


def test_a_group_that_is_gone_cannot_be_entered(tmp_path: Path) -> None:
    """A node without its group would not be bounded: it does not start."""
    with pytest.raises(FileNotFoundError):
        enter([str(tmp_path / "none" / "cgroup.procs")])


def group_file(group: NodeGroup, *names: str) -> str:
    """Return what the first of these files says that is there."""
    return next((folder / name).read_text() for name in names for folder in group.folders if (folder / name).exists())


def share_of(pid: int, seconds: float) -> float:
    """Return the share of a processor that a process has for some seconds."""
    began, before = time.monotonic(), ticks_of(pid)
    time.sleep(seconds)
    return (ticks_of(pid) - before) / 100 / (time.monotonic() - began)


def ticks_of(pid: int) -> int:
    """Return a process's hundredths of a second of computing."""
    return int(fields(pid)[11]) + int(fields(pid)[12])


def fields(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
