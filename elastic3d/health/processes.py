"""What the kernel says of a trainer's processes: their state, processor time, reads and writes. Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

_TICK = 1000 // os.sysconf("SC_CLK_TCK")
"""Milliseconds of the unit of processor time in /proc."""


LARGEST = 64 << 10
"""Characters of a file of /proc that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """A trainer and the processes of its group at one time.

    at: seconds, of any clock that is right between two samples. state: the letter of its main thread's state, "" if it
    is gone. wchan: where in the kernel that waits, "" if it does not or that cannot be known. cpu: milliseconds of
    processor time of the trainer, queued: those in which its main thread was ready to run and did not get a processor;
    io: bytes that it read and wrote. others: pid, cpu and io of each other process of its group.
    """

    at: float
    state: str
    wchan: str = ""
    cpu: int = 0
    queued: int = 0
    io: int = 0
    others: tuple[tuple[int, int, int], ...] = ()


def group_of(leader: int) -> tuple[int, ...]:
    """Return the pids of a process group but for its leader's; reads all of /proc."""
    members = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != leader:
            fields = stat_fields(int(name))
            if fields and int(fields[2]) == leader:
                members.append(int(name))
    return tuple(members)


def sample(leader: int, others: Sequence[int], at: float) -> ProcessSample:
    """Look at a trainer, the leader of its group, and at other processes of the group; those that are gone count 0."""
    fields = stat_fields(leader)
    if not fields:
        return ProcessSample(at=at, state="")
    wchan = read_proc(f"/proc/{leader}/wchan").strip()
    scheduled = read_proc(f"/proc/{leader}/schedstat").split()
    return ProcessSample(
        at=at,
        state=fields[0],
        wchan="" if wchan == "0" else wchan,
        cpu=_cpu(fields),
        queued=int(scheduled[1]) // 1_000_000 if len(scheduled) > 1 else 0,
        io=_io(leader),
        others=tuple((pid, _cpu(stat_fields(pid)), _io(pid)) for pid in others),
    )


def others_between(first: ProcessSample, last: ProcessSample) -> tuple[int, int]:
    """Return the processor time and the bytes of the processes beside a trainer that are in both samples."""
    before = {pid: (cpu, io) for pid, cpu, io in first.others}
    both = [(cpu, io, *before[pid]) for pid, cpu, io in last.others if pid in before]
    return sum(cpu - was for cpu, _, was, _ in both), sum(io - was for _, io, _, was in both)


def stat_fields(pid: int | str) -> list[str]:
    """Return state, parent, group, session...: the fields after the name, which may hold anything; none if it is gone.

    pid: or "<pid>/task/<thread>".
    """
    return read_proc(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _cpu(fields: list[str]) -> int:
    return (int(fields[11]) + int(fields[12])) * _TICK if fields else 0


def _io(pid: int) -> int:
    lines = dict(line.split(": ") for line in read_proc(f"/proc/{pid}/io").splitlines())
    return int(lines.get("rchar", 0)) + int(lines.get("wchar", 0))


def read_proc(path: str) -> str:
    """Return a file of /proc; "" where the process is gone, or the kernel lacks the file or does not show it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LARGEST)
    except OSError:
        return ""
