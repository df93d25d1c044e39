"""A backup of etcd: one file, taken over the network, looked at, and made a cluster of.

The file is what `etcdctl snapshot save` writes: the database, whose size is a whole number of sectors, and the SHA-256
of it (etcd's `etcdutl/snapshot/v3_snapshot.go` reads it so). It has all keys, and the users' passwords as hashes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic3d.errors import ConfigurationError, EtcdUnavailable, UsageError
from elastic3d.etcd_server.binary import find_tool
from elastic3d.etcd_server.cluster import ServerCluster, initial_cluster, peer_url, write_cluster

DIGEST, SECTOR = 32, 512
_CHUNK = 1 << 20
RESTORE_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFacts:
    """A whole snapshot. size: bytes of its file. digest: the SHA-256 of the database in it, in hexadecimal."""

    size: int
    digest: str


def save(pieces: Iterable[bytes], path: Path, *, force: bool = False) -> SnapshotFacts:
    """Write a snapshot to a file that nobody else can read, all of it or nothing, and return what it is.

    force: over one that is there. UsageError where that was not asked for; ConfigurationError where it cannot be
    written; EtcdUnavailable where what came is not whole.
    """
    if path.is_dir() or (path.exists() and not force):
        raise UsageError(f"{path} is there already; give another name{'' if path.is_dir() else ', or --force'}")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is no folder; make it first")
    part: Path | None = None
    try:
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        part = Path(name)
        with open(number, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        facts = _facts(part)
        if isinstance(facts, str):
            raise EtcdUnavailable(f"etcd: the snapshot that came is not whole: {facts}; nothing was kept, try again")
        part.replace(path)
        return facts
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}; nothing was kept, mend that") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def verify(path: Path) -> SnapshotFacts:
    """Return what a snapshot is; UsageError if it is not whole."""
    try:
        facts = _facts(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if isinstance(facts, str):
        raise UsageError(f"{path} is no whole snapshot of etcd: {facts}; take another one")
    return facts


def _facts(path: Path) -> SnapshotFacts | str:
    """Return what a snapshot is, or why it is not whole."""
    size = path.stat().st_size
    if size < SECTOR + DIGEST:
        return f"it has {size} bytes only"
    if size % SECTOR != DIGEST:
        return "it does not end with a digest, so a part of it is missing"
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        left = size - DIGEST
        while left:
            piece = file.read(min(_CHUNK, left))
            if not piece:
                return "it became shorter while it was read"
            hashed.update(piece)
            left -= len(piece)
        expected = file.read(DIGEST)
    if hashed.digest() != expected:
        return "its contents are not those of its digest"
    return SnapshotFacts(size=size, digest=hashed.hexdigest())


def restore(snapshot: Path, cluster: ServerCluster, folder: Path, binary: Path) -> None:
    """Make the data of this machine's members of a new cluster from a snapshot that was verified.

    `folder` is not there, or empty, and is made at once, when all is done. ConfigurationError says what etcd's own tool
    said, or what could not be written.
    """
    tool = find_tool(binary, "etcdutl", "etcdctl")
    part: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        for member in cluster.own:
            command = [
                *(str(tool), "snapshot", "restore", str(snapshot)),
                *("--name", member.name, "--data-dir", str(part / member.name)),
                *("--initial-cluster", initial_cluster(cluster), "--initial-cluster-token", cluster.token),
                *("--initial-advertise-peer-urls", peer_url(cluster, member)),
            ]
            _run(command)
        write_cluster(part, replace(cluster, started=True))
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
        part = None
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made: {error.strerror}; nothing was kept") from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _run(command: list[str]) -> None:
    environment = os.environ | {"ETCDCTL_API": "3"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=RESTORE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"etcd: {command[0]} did not end within {RESTORE_TIMEOUT:.0f} s; try again") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2][:500]
        raise ConfigurationError(f"etcd: {command[0]} did not restore the snapshot: {said}")
