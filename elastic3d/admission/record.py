"""What a refused node leaves in etcd: `refused/<node>` under the run's root, gone by itself after an hour.

It is no member: nobody who decides reads it, `status` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d import etcd_keys as keys
from elastic3d.admission.check import CheckResult
from elastic3d.etcd import EtcdClient
from elastic3d.membership.records import encode

KEPT = 3600.0
"""Seconds a refusal can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAdmission:
    """A node that did not pass its own checks; `checks` are the failed ones."""

    node: str
    address: str
    checks: tuple[CheckResult, ...]


def leave_word(client: EtcdClient, root: str, refusal: FailedAdmission) -> None:
    """Write why this node is kept out. An earlier word of this node is replaced."""
    lease, _ = client.grant(KEPT)
    client.put(root + keys.refused(refusal.node), encode(refusal), lease, idempotent=True)


def take_back(client: EtcdClient, root: str, node: str) -> None:
    """Delete what an earlier start of this node left: it has passed now."""
    if client.get(root + keys.refused(node)) is not None:
        client.delete(root + keys.refused(node), idempotent=True)
