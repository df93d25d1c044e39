"""A run id that somebody has closed: no node finds a rendezvous under it any more, as torch has it.

A key beside the run's records, which nobody but the handlers of mode=restart reads. It goes by itself after two hours,
as what torch's own etcd backend kept of a run: the id can be used again then.
"""

from __future__ import annotations

from elastic3d.etcd import EtcdClient

KEY = "closed"
SECONDS = 7200.0
"""Seconds for which a run id stays closed."""

POLL = 2.0
"""Seconds between two looks of a node that waits."""


def close(client: EtcdClient, root: str, node: str) -> None:
    """Close the run id of the job under `root`, in the name of `node`."""
    lease, _ = client.grant(SECONDS)
    client.put(root + KEY, node.encode(), lease, idempotent=True)


def closed_by(client: EtcdClient, root: str) -> str | None:
    """Return the node that has closed the run id, None where it is open."""
    found = client.get(root + KEY)
    return None if found is None else found.value.decode(errors="replace")


def words(run_id: str, node: str) -> str:
    """Return what who comes now is told."""
    return (
        f"node {node} has closed run id {run_id}, so that there is no further rendezvous under it; trying again helps "
        "in two hours, when the id is free again, another --rdzv-id at once"
    )
