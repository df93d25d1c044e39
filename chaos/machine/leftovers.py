"""What a job may leave behind besides processes: names in shared memory, listening ports, leases and keys in etcd."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from chaos.machine.processes import wait_until
from chaos.machine.strangers import Port, listeners
from elastic3d import etcd_keys as keys
from elastic3d.errors import EtcdUnavailable
from elastic3d.etcd import EtcdClient

# A killed node's lease expires by itself: its TTL, plus the interval at which etcd checks.
_LEASE_PATIENCE = 10.0
_RECORDS = 60.0
"""The shortest time, in seconds, that records which outlive a job are kept for; a living member's lease has less."""
_SHARED_MEMORY = Path("/dev/shm")
# Records about machines, of who was turned away, and of the newest end outlive the job, on leases of their own.
_REMEMBERED = (keys.FLAPS, keys.QUARANTINE, keys.REFUSED, keys.LAST_END)


def shared_memory() -> frozenset[str]:
    """Return the names of all shared-memory segments."""
    return frozenset(os.listdir(_SHARED_MEMORY))


def shared_memory_left(before: frozenset[str], patience: float = 2.0) -> list[str]:
    """Return the segments that came after `before`, are of a kind we or torch make, and belong to nobody alive."""

    def left() -> list[str]:
        return sorted(name for name in shared_memory() - before if "elastic3d" in name or _orphaned(name))

    wait_until(lambda: not left(), patience)
    return [f"shared memory {name}" for name in left()]


def ports_left(seen: Mapping[str, tuple[str, Port]], patience: float = 2.0) -> list[str]:
    """Return the listening sockets among those `seen`, by inode, with the node they were of, that somebody still has.

    A process that started another one may have left them to it. Of nodes that are hosts of their own none is seen here.
    """

    def left() -> list[str]:
        return sorted(seen.keys() & listeners().keys())

    wait_until(lambda: not left(), patience)
    named = ((seen[inode][0], *seen[inode][1]) for inode in left())
    return [f"port {number} of {address}, on which {node} listened" for node, address, number in named]


def keys_left(connect: Callable[[], EtcdClient], prefix: str) -> list[str]:
    """Return the keys under `prefix` that have no lease, and are not of those that stay for the next job."""
    try:
        with connect() as client:
            items, _revision = client.range(prefix)
    except EtcdUnavailable as error:
        return [f"unknown keys: {error}"]
    lasting = tuple(prefix + key for key in keys.LASTING)
    own = (item.key for item in items if not item.lease)
    return [f"etcd key {key} without a lease" for key in own if not key.startswith(lasting)]


def leases_left(
    connect: Callable[[], EtcdClient], prefix: str, *, alone: bool, patience: float = _LEASE_PATIENCE
) -> list[str]:
    """Return the keys under `prefix` that hang on a lease after `patience`; with `alone`, any lease of the server.

    Records that outlive their job by their nature are not counted, whichever job wrote them; nor is a lease
    without a key that was granted for as long as these: its writer was killed in between, or a newer record is there.
    """

    def left() -> list[str]:
        items, _revision = client.range("" if alone else prefix)
        leased = [item for item in items if item.lease]
        kept = {item.lease for item in leased if any(f"/{kind}" in item.key for kind in _REMEMBERED)}
        mine = [item for item in leased if item.key.startswith(prefix) and item.lease not in kept]
        keys = [f"etcd key {item.key} under lease {item.lease:x}" for item in mine]
        leases = [lease for lease in (client.leases() if alone else ()) if lease not in kept]
        return keys or [f"etcd lease {lease:x}" for lease in leases if (client.granted(lease) or _RECORDS) < _RECORDS]

    try:
        with connect() as client:
            wait_until(lambda: not left(), patience, interval=0.2)
            return left()
    except EtcdUnavailable as error:
        return [f"unknown leases: {error}"]


def _orphaned(name: str) -> bool:
    pid = name.removeprefix("torch_").partition("_")[0]
    return name.startswith("torch_") and pid.isdigit() and not Path(f"/proc/{pid}").exists()
