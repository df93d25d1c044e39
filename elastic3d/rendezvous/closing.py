"""A run id that somebody has closed: no node finds a rendezvous under it any more, as torch defines it.

A key beside the run's records, which only the handlers of mode=restart read. It expires after two hours, like the keys
of torch's own etcd backend: then the id can be used again.
"""

from __future__ import annotations

from elastic3d.etcd import EtcdClient

KEY = "closed"
SECONDS = 7200.0
"""Seconds for which a run id stays closed."""

POLL = 2.0
"""Seconds between two reads by a node that waits."""


def close(client: EtcdClient, root: str, node: str) -> None:
    """Close the run id of the job under `root`, in the name of `node`."""
    lease, _ = client.grant(SECONDS)
    client.put(root + KEY, node.encode(), lease, idempotent=True)


def closed_by(client: EtcdClient, root: str) -> str | None:
    """Return the node that has closed the run id, None if it is open."""
    entry = client.get(root + KEY)
    return None if entry is None else entry.value.decode(errors="replace")


def words(run_id: str, node: str) -> str:
    """Return the error text for a node that comes now."""
    return (
        f"node {node} has closed run id {run_id}, so that there is no further rendezvous under it; trying again helps "
        "in two hours, when the id is free again, another --rdzv-id at once"
    )
