"""What can be done to a real etcd cluster that serves a job, apart from its processes.

Each function does what an operator, a neighbour or the passing of time does to a cluster in use.
"""

from __future__ import annotations

import base64
from typing import Any

from chaos.servers.etcd import START_TIMEOUT, EtcdCluster, EtcdMember
from elastic3d.clock import SYSTEM
from elastic3d.errors import EtcdError, EtcdUnavailable
from elastic3d.etcd import EtcdClient

BALLAST = "/ballast/"
"""Where a neighbour's data lie that fill a database."""

CHUNK = 256 * 1024


def fill(cluster: EtcdCluster) -> None:
    """Write until the database is over its quota and the alarm NOSPACE is raised, as a careless neighbour would."""
    with cluster.client() as client:
        number = 0
        while not alarms(cluster):
            try:
                client.put(f"{BALLAST}{number}", b"x" * CHUNK)
            except EtcdError:
                pass  # over the quota; the alarm follows
            number += 1


def make_space(cluster: EtcdCluster, patience: float = START_TIMEOUT) -> None:
    """Do what etcd's operators are advised to do about NOSPACE: delete, compact, defragment each member, disarm.

    EtcdUnavailable if a member still takes no writes after `patience` seconds.
    """
    with cluster.client() as client:
        client.delete(BALLAST, prefix=True)
    compact(cluster)
    for member in cluster.members:
        cluster.ask("/v3/maintenance/defragment", {}, member)
    for alarm in alarms(cluster):
        cluster.ask("/v3/maintenance/alarm", {"action": "DEACTIVATE", **alarm})
    deadline = SYSTEM.monotonic() + patience
    for member in cluster.members:
        # A member that is behind has not heard of it yet.
        while not _writes(cluster, member):
            if SYSTEM.monotonic() >= deadline:
                raise EtcdUnavailable(f"etcd: {member.name} takes no writes, though space was made")
            SYSTEM.sleep(0.05)


def _writes(cluster: EtcdCluster, member: EtcdMember) -> bool:
    key = base64.b64encode(BALLAST.encode()).decode()
    try:
        cluster.ask("/v3/kv/put", {"key": key}, member)
    except OSError:
        return False
    return True


def alarms(cluster: EtcdCluster) -> list[dict[str, Any]]:
    """Return the raised alarms, one per member."""
    return list(cluster.ask("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", []))


def compact(cluster: EtcdCluster) -> None:
    """Let etcd forget all history up to now."""
    with cluster.client() as client:
        _nothing, revision = client.range("/nothing/")
        client.compact(revision)


def revoke(client: EtcdClient, key: str) -> None:
    """Revoke the lease of `key`, as somebody tidying up would."""
    item = client.get(key)
    assert item is not None, f"there is no {key}"
    assert item.lease, f"{key} has no lease"
    client.revoke(item.lease)


def move_leader(cluster: EtcdCluster) -> bool:
    """Have the leader hand over to the next member; return False where that is not done in time."""
    leader = cluster.leader()
    other = cluster.members[(cluster.members.index(leader) + 1) % len(cluster.members)]
    target = cluster.ask("/v3/maintenance/status", {}, other)["header"]["member_id"]
    try:
        cluster.ask("/v3/maintenance/transfer-leadership", {"targetID": target}, leader)
    except OSError:
        return False
    return True


def change_password(cluster: EtcdCluster, password: str) -> None:
    """Give root another password."""
    cluster.ask("/v3/auth/user/changepw", {"name": "root", "password": password})
    cluster.password = password
