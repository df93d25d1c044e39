"""What counts as left behind in etcd: leases of the living, not what is to be remembered of machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.etcd import EtcdServer
from chaos.leftovers import leases_left

pytestmark = pytest.mark.etcd

JOB = "/elastic3d/job/"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def test_a_members_lease_counts(etcd: EtcdServer) -> None:
    """With the key that stands under it, and without."""
    with etcd.client() as client:
        lease, _ = client.grant(10)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == [f"etcd lease {lease:x}"]
        client.put(f"{JOB}roll/members/a@1", b"{}", lease=lease)
        left = leases_left(etcd.client, JOB, alone=False, patience=0)
        assert left == [f"etcd key {JOB}roll/members/a@1 under lease {lease:x}"]
        client.revoke(lease)
    assert leases_left(etcd.client, JOB, alone=True, patience=0) == []


def test_what_is_remembered_of_machines_does_not(etcd: EtcdServer) -> None:
    """A count of losses is kept for an hour; its writer may be killed between its lease and its key."""
    with etcd.client() as client:
        lease, _ = client.grant(3600)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.put(f"{JOB}roll/flaps/a", b"{}", lease=lease)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.revoke(lease)
