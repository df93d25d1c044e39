"""Processes of this machine, found by a mark in their environment and ended by pid.

A mark is an environment variable with a value of its own per run. Every process started under it carries it through
fork and exec, whatever becomes of its parent, so that nothing started on behalf of a run can hide.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elastic3d.clock import SYSTEM, Clock
from elastic3d.etcd_server.process import free_ports

MARK = "ELASTIC3D_CHAOS_RUN"
_LEASH = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "for entry in filter(None, sys.argv[2].split(os.pathsep)):\n"
    "    with open(entry, 'w') as file:\n"
    "        file.write('0')\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


class Part(StrEnum):
    """Which of a node's processes."""

    AGENT = "agent"
    KEEPERS = "keepers"
    TEMPLATES = "templates"
    TRAINERS = "trainers"
    LOADERS = "loaders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A process that carries a mark."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid}: {self.command}"


def leashed(command: Sequence[str], entries: Iterable[Path] = ()) -> list[str]:
    """Return `command` so wrapped that it dies with the thread that starts it.

    A small interpreter sets the parent-death signal and becomes the command by exec, which keeps the signal: no code
    of ours runs between fork and exec of a process that has threads. entries: of control groups, which it enters first.
    """
    within = os.pathsep.join(map(str, entries))
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), within, *command]


def all_pids() -> set[int]:
    """Return the pids of all processes that there are."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def marked(mark: str, variable: str = MARK, *, besides: Collection[int] = ()) -> list[Found]:
    """Return the living processes that carry `mark` in `variable`, this one excepted; zombies are not living.

    besides: processes that cannot carry it, since they were there before the mark was made: of each other one the
    environment is read, which takes a fifth of a millisecond.
    """
    wanted = f"{variable}={mark}".encode()
    processes = []
    for pid in all_pids() - {os.getpid(), *besides}:
        folder = f"/proc/{pid}"
        try:
            if wanted not in _environment(folder).split(b"\0"):
                continue
            if Path(folder, "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            command = Path(folder, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        processes.append(Found(pid=pid, command=command[:160]))
    return processes


def _environment(folder: str) -> bytes:
    """Return the environment of a process, b"" if it has none.

    Within exec there is none for a moment, and neither is the auxiliary vector, which is written just before it. A file
    that was opened before shows what was then: so "none" has to be read a few times.
    """
    none = 0
    while none < 5:
        if environment := Path(folder, "environ").read_bytes():
            return environment
        auxiliary = Path(folder, "auxv").read_bytes()
        if not auxiliary:
            return b""  # a thread of the kernel, or a zombie
        none += any(auxiliary)
    return b""


def children(pid: int) -> list[int]:
    """Return the pids of the children of `pid`."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids += [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


def descendants(pid: int) -> list[int]:
    """Return the pids of all that descend from `pid`, parents before their children."""
    pids = [pid]
    for one in pids:
        pids += [child for child in children(one) if child not in pids]
    return pids[1:]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send signal `number` to every one of `pids` that still lives."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_until(condition: Callable[[], bool], seconds: float, clock: Clock = SYSTEM, interval: float = 0.05) -> bool:
    """Return whether `condition` came true within `seconds`."""
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() >= deadline:
            return False
        clock.sleep(interval)
    return True


def end_all(mark: str, seconds: float = 10.0) -> list[Found]:
    """Kill all processes with `mark`; return those still alive after `seconds`, which should be none."""

    def gone() -> bool:
        left = marked(mark)
        send((process.pid for process in left), signal.SIGKILL)
        return not left

    return [] if wait_until(gone, seconds) else marked(mark)


def free_port() -> int:
    """Return a TCP port of the loopback address that is free now, and that the system gives to nobody who asks."""
    return free_ports(1)[0]
