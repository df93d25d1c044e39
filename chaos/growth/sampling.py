"""What a job holds at one moment: its processes by /proc, its keys in etcd, and its folders.

Memory is PSS with what of it is in swap: a page that n processes share counts 1/n in each, so that sums are right. For
the same reason it changes in one process when others come and go. So what a process holds is also counted without
sharing: all its anonymous pages, its part of shared memory, and what is in swap. A process that ends while it is read
is not in the sample; nor is etcd while it does not answer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.machine.cluster import AgentNode
from chaos.machine.processes import Part
from chaos.servers.etcd import EtcdCluster
from elastic3d import etcd_keys
from elastic3d.errors import EtcdUnavailable
from elastic3d.etcd import EtcdClient

KINDS = {Part.AGENT: "agent", Part.KEEPERS: "keeper", Part.TEMPLATES: "template", Part.TRAINERS: "trainer"}
ETCD = "etcd"
_PAST = (etcd_keys.HISTORY, etcd_keys.VERDICTS)
_BUDGET = 1.0
_SHARED, _HELD = ("Pss", "SwapPss"), ("Anonymous", "Pss_Shmem", "Swap")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """One process. kind: of `KINDS`, or etcd. node: "" for etcd. memory: PSS, in bytes. held: without sharing."""

    kind: str
    node: str
    pid: int
    memory: int
    held: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSample:
    """The keys of the run by their prefix, their bytes with those of their values, and the bytes of etcd's database.

    past: keys of earlier generations, of which a job keeps a fixed number.
    """

    keys: dict[str, int]
    past: int
    bytes: int
    database: int
    in_use: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSample:
    """Files below a folder, and their bytes."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All of it. at: seconds since the run began."""

    at: float
    step: int
    generation: int
    processes: tuple[ProcessSample, ...] = ()
    etcd: EtcdSample | None = None
    store: FolderSample = field(default_factory=lambda: FolderSample(files=0, bytes=0))
    events: FolderSample = field(default_factory=lambda: FolderSample(files=0, bytes=0))


def process(pid: int, kind: str, node: str = "") -> ProcessSample | None:
    """Return what a process holds now; None where it has ended, or is not ours to look at."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        threads = len(os.listdir(f"/proc/{pid}/task"))
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    memory, held = (1024 * _kilobytes(rollup, names) for names in (_SHARED, _HELD))
    # Nothing at all is left of one that has ended and was not reaped yet.
    return (
        ProcessSample(kind=kind, node=node, pid=pid, memory=memory, held=held, descriptors=descriptors, threads=threads)
        if memory
        else None
    )


def processes(nodes: Iterable[AgentNode]) -> tuple[ProcessSample, ...]:
    """Return the processes of some nodes: agents, keepers, the templates in use, and trainers."""
    seen = [
        process(pid, kind, node.name)
        for node in nodes
        if node.alive
        for part, kind in KINDS.items()
        for pid in node.processes(part)
    ]
    return tuple(one for one in seen if one is not None)


def servers(etcd: EtcdCluster) -> tuple[ProcessSample, ...]:
    """Return etcd's own processes."""
    seen = [process(member.pid, ETCD) for member in etcd.members if member.alive]
    return tuple(one for one in seen if one is not None)


def etcd_sample(etcd: EtcdCluster, client: EtcdClient, root: str) -> EtcdSample | None:
    """Return what a run has in etcd; None while it is away."""
    if not etcd.serving:
        return None
    try:
        items, _revision = client.range(root, budget=_BUDGET)
        status = etcd.ask("/v3/maintenance/status", {})
    except (EtcdUnavailable, OSError, ValueError):
        return None
    keys = [item.key.removeprefix(root) for item in items]
    past = sum(key.startswith(_PAST) for key in keys)
    counts = Counter("/".join(key.split("/")[:-1]) for key in keys if not key.startswith(_PAST))
    return EtcdSample(
        keys=dict(sorted(counts.items())),
        past=past,
        bytes=sum(len(item.key) + len(item.value) for item in items),
        database=int(status["dbSize"]),
        in_use=int(status["dbSizeInUse"]),
    )


def folder(path: Path) -> FolderSample:
    """Return the files below a folder now; those that vanish meanwhile are not counted."""
    sizes = []
    for parent, _, names in os.walk(path):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return FolderSample(files=len(sizes), bytes=sum(sizes))


def _kilobytes(text: str, names: Sequence[str]) -> int:
    wanted = [line.split() for line in text.splitlines() if line.partition(":")[0] in names]
    return sum(int(words[1]) for words in wanted)
