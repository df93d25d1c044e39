"""Memory, shared memory and limits of this machine: is there room for what a node holds?

Snapshots lie in memfd segments, which count as this machine's memory and have no limit of their own. /dev/shm is what
data loaders and NCCL use.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastic3d.admission.host import available_memory
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.words import spell_size
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.holdings import most_copies
from elastic3d.trust.listening import MOST_FILES

TRAINER = 1 << 29
"""Bytes of host memory that a trainer takes before it holds anything: an interpreter with torch imported, and more."""

HELD = most_copies(buddy=True)
"""Snapshots in a node's memory for each slot: its own and its buddy's."""

SHM = 1 << 30
SHM_SLOT = 64 << 20
"""Bytes of /dev/shm below which people are warned; and, for each slot, below which NCCL and data loaders fail."""

FILES, FEWEST_FILES = 4096, 256
PROCESSES, FEWEST_PROCESSES = 4096, 128
"""Open files, and processes with their threads, below which people are warned, and below which a node fails."""

SEGMENT = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the kernel says. Limits are None where there is none, sizes None where there is no such thing."""

    total: int
    available: int
    strict: bool
    """Whether memory is promised only where it is there (vm.overcommit_memory=2)."""
    shm_size: int | None
    shm_free: int | None
    memfd: str
    """Why a shared segment cannot be made, "" where it can."""
    files: int | None
    """That a process may allow itself: elastic3d does."""
    processes: int | None
    file_size: int | None
    address_space: int | None
    locked: int | None
    infiniband: bool


def judge(facts: HostFacts, slots: int) -> tuple[NodeFinding, ...]:
    """Say whether there is room for this many slots."""
    return (_memory(facts, slots), _memfd(facts), _shm(facts, slots), *_limits(facts))


def _memory(facts: HostFacts, slots: int) -> NodeFinding:
    limited = f" of {spell_size(facts.total)}"
    seen = f"{spell_size(facts.available)} available{limited}"
    left = facts.available - slots * TRAINER
    if left < 0:
        return failure(
            Subject.MEMORY,
            "host",
            f"{seen}, for {slots} slot(s)",
            f"a trainer alone takes about {spell_size(TRAINER)}: end what else runs here, raise the container's limit, "
            "or use fewer slots",
        )
    room = f"{seen}; room for snapshots of {spell_size(left // (slots * HELD))} of state on each of {slots} slot(s)"
    if facts.strict:
        return warning(
            Subject.MEMORY,
            "host",
            f"{room}; the kernel promises no more memory than there is (vm.overcommit_memory=2)",
            "sysctl vm.overcommit_memory=0, or segments that are large and mostly empty are refused",
        )
    return ok(Subject.MEMORY, "host", room)


def _memfd(facts: HostFacts) -> NodeFinding:
    if facts.memfd:
        return failure(
            Subject.MEMORY,
            "shared segments",
            f"a memfd segment cannot be made: {facts.memfd}",
            "let the container's seccomp profile allow memfd_create and fcntl seals; elastic3d keeps snapshots there",
        )
    return ok(Subject.MEMORY, "shared segments", "memfd segments can be made, sealed and mapped")


def _shm(facts: HostFacts, slots: int) -> NodeFinding:
    more = "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if facts.shm_size is None or facts.shm_free is None:
        return failure(
            Subject.MEMORY, "/dev/shm", "it is not there, or not writable; data loaders and NCCL need it", more
        )
    seen = f"{spell_size(facts.shm_free)} free of {spell_size(facts.shm_size)}"
    if facts.shm_free < slots * SHM_SLOT:
        return failure(Subject.MEMORY, "/dev/shm", f"{seen}: too little for NCCL and data loaders", more)
    if facts.shm_free < SHM:
        return warning(Subject.MEMORY, "/dev/shm", f"{seen}: data loaders with several workers may need more", more)
    return ok(Subject.MEMORY, "/dev/shm", seen)


def _limits(facts: HostFacts) -> tuple[NodeFinding, ...]:
    findings = [
        _count(
            "open files",
            facts.files,
            FILES,
            FEWEST_FILES,
            "raise the hard limit: ulimit -Hn 65536, LimitNOFILE=65536 in systemd, docker run --ulimit nofile=65536",
        ),
        _count(
            "processes",
            facts.processes,
            PROCESSES,
            FEWEST_PROCESSES,
            "raise it: ulimit -u, TasksMax= in systemd, docker run --pids-limit",
        ),
    ]
    if facts.file_size is not None:
        findings.append(
            failure(
                Subject.LIMITS,
                "file size",
                f"no file or shared segment may be larger than {spell_size(facts.file_size)}",
                "ulimit -f unlimited: snapshots and packs of checkpoints are as large as the state",
            )
        )
    if facts.address_space is not None:
        findings.append(
            warning(
                Subject.LIMITS,
                "address space",
                f"at most {spell_size(facts.address_space)} of it for each process",
                "ulimit -v unlimited: CUDA and shared segments take far more addresses than memory",
            )
        )
    if facts.infiniband and facts.locked is not None:
        findings.append(
            warning(
                Subject.LIMITS,
                "locked memory",
                f"at most {spell_size(facts.locked)}, and there is an InfiniBand device",
                "ulimit -l unlimited: NCCL registers its buffers with the adapter",
            )
        )
    return tuple(findings)


def _count(name: str, most: int | None, wanted: int, needed: int, remedy: str) -> NodeFinding:
    if most is None:
        return ok(Subject.LIMITS, name, "no limit")
    if most >= wanted:
        return ok(Subject.LIMITS, name, f"up to {most:,}")
    judged = failure if most < needed else warning
    return judged(Subject.LIMITS, name, f"up to {most:,}; many nodes and slots need {wanted:,}", remedy)


def measure() -> HostFacts:
    """Look at this machine."""
    shm_size, shm_free = _file_system("/dev/shm")
    return HostFacts(
        total=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=available_memory(lambda path: Path(path).read_text()),
        strict=_text("/proc/sys/vm/overcommit_memory") == "2",
        shm_size=shm_size,
        shm_free=shm_free,
        memfd=_segment(Arena.create),
        files=_limit(resource.RLIMIT_NOFILE, most=MOST_FILES),
        processes=_processes(),
        file_size=_limit(resource.RLIMIT_FSIZE, soft=True),
        address_space=_limit(resource.RLIMIT_AS, soft=True),
        locked=_limit(resource.RLIMIT_MEMLOCK, soft=True),
        infiniband=Path("/dev/infiniband").is_dir(),
    )


def _segment(create: Callable[[], Arena]) -> str:
    """Return why a segment cannot be made, sealed, grown and written, "" where it can."""
    try:
        arena = create()
        try:
            arena.reserve(SEGMENT)
            with mmap.mmap(arena.descriptor, SEGMENT) as mapping:
                mapping[-1] = 1
        finally:
            arena.close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _file_system(path: str) -> tuple[int | None, int | None]:
    try:
        statistics = os.statvfs(path)
    except OSError:
        return None, None
    if not os.access(path, os.W_OK):
        return None, None
    return statistics.f_frsize * statistics.f_blocks, statistics.f_frsize * statistics.f_bavail


def _limit(kind: int, *, soft: bool = False, most: int | None = None) -> int | None:
    now, hard = resource.getrlimit(kind)
    limit = now if soft else hard
    if limit == resource.RLIM_INFINITY:
        return None
    return limit if most is None else min(limit, most)


def _processes() -> int | None:
    """Return the smallest of what the user, and the control groups, may have; root's own limit does not hold."""
    limits = [] if os.geteuid() == 0 else [_limit(resource.RLIMIT_NPROC, soft=True)]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            base = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/pids"
            if controllers and "pids" not in controllers.split(","):
                continue
            for folder in (Path(group), *Path(group).parents):
                text = _text(f"{base}{str(folder).rstrip('/')}/pids.max")
                limits.append(int(text) if text.isdecimal() else None)
    return min((one for one in limits if one is not None), default=None)


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
