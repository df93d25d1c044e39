"""A directory as a store: is there room, whose is it, and do other machines see it?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import StoreUnfit
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.words import spell_size

ROOM = 10 << 30
"""Free bytes of a directory's file system below which people are warned."""

SHARED = frozenset((
    "nfs", "nfs4", "lustre", "ceph", "cifs", "smb3", "gpfs", "beegfs", "glusterfs", "ocfs2", "gfs2", "9p", "virtiofs",
    "afs", "wekafs", "pvfs2", "orangefs",
))  # fmt: skip
"""Kinds of file systems that several machines see; all of FUSE may be such, too."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryFacts:
    """Where a directory's objects would be. there: it is there already; else it would be made in `inside`.

    kind: of its file system, "" where that cannot be told. denied: its folders that this user may not write to.
    """

    there: bool
    inside: str
    kind: str
    free: int
    denied: tuple[str, ...] = ()


def judge(facts: DirectoryFacts, url: str) -> list[NodeFinding]:
    """Say whether checkpoints can be kept in a directory, and by how many nodes."""
    name = "directory"
    if facts.denied:
        return [
            failure(
                Subject.STORE,
                name,
                f"this user may not write to {', '.join(facts.denied)} in {url}",
                "somebody else made them: chown or chmod them, or run as that user",
            )
        ]
    seen = f"{spell_size(facts.free)} free" + (f" on {facts.kind}" if facts.kind else "")
    if not facts.there:
        seen = f"it will be made in {facts.inside}; {seen}"
    if facts.free < ROOM:
        return [
            warning(Subject.STORE, name, seen, "free space: a job that cannot write a checkpoint goes on without one")
        ]
    if facts.kind and facts.kind not in SHARED and not facts.kind.startswith("fuse"):
        return [
            warning(
                Subject.STORE,
                name,
                f"{seen}: only this machine sees it",
                "with more than one node, give a directory that all of them mount, or an object store",
            )
        ]
    return [ok(Subject.STORE, name, seen)]


def measure(path: Path) -> DirectoryFacts:
    """Look at where a directory is, or would be made; StoreError where neither can be."""
    there = path.is_dir()
    inside = path
    while not inside.is_dir():
        if inside.exists() or inside.is_symlink():
            raise StoreUnfit(f"store {path}: {inside} is no directory")
        inside = inside.parent
    room = os.statvfs(inside)
    # Where nothing may be written at all, that is what is told.
    writable = there and os.access(inside, os.W_OK | os.X_OK)
    folders = [one for one in os.scandir(inside) if writable and one.is_dir() and not one.name.startswith(".")]
    return DirectoryFacts(
        there=there,
        inside=str(inside),
        kind=file_system_of(inside.resolve(), os.fsdecode(Path("/proc/self/mountinfo").read_bytes())),
        free=room.f_frsize * room.f_bavail,
        denied=tuple(sorted(one.name for one in folders if not os.access(one.path, os.W_OK | os.X_OK))),
    )


def file_system_of(path: Path, mounts: str) -> str:
    """Return the kind of file system that `path` is on, from the text of mountinfo (proc(5)); "" if none fits."""
    best, kind = "", ""
    for line in mounts.split("\n"):
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = _ESCAPED.sub(lambda escape: chr(int(escape[1], 8)), fields[4])
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind
