"""The record that a refused node leaves in etcd: `refused/<node>` under the run's root, which expires after an hour.

The node is not a member: no decision depends on the record, `status` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d import etcd_keys as keys
from elastic3d.admission.check import CheckResult
from elastic3d.etcd import EtcdClient
from elastic3d.membership.records import encode

KEPT = 3600.0
"""Seconds for which a refusal can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAdmission:
    """A node that did not pass its own checks; `checks` are the failed ones."""

    node: str
    address: str
    checks: tuple[CheckResult, ...]


def leave_word(client: EtcdClient, root: str, refusal: FailedAdmission) -> None:
    """Write why this node is kept out, in place of an earlier record of this node."""
    lease, _ = client.grant(KEPT)
    client.put(root + keys.refused(refusal.node), encode(refusal), lease, idempotent=True)


def take_back(client: EtcdClient, root: str, node: str) -> None:
    """Delete the record of an earlier start of this node: it has passed now."""
    if client.get(root + keys.refused(node)) is not None:
        client.delete(root + keys.refused(node), idempotent=True)
