"""What counts as left over in etcd: leases of living members, but not what has to outlive a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.machine.leftovers import leases_left
from chaos.servers.etcd import EtcdServer

pytestmark = pytest.mark.etcd

JOB = "/elastic3d/job/"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def test_a_members_lease_counts_as_left_over(etcd: EtcdServer) -> None:
    """With the key that is attached to it, and without."""
    with etcd.client() as client:
        lease, _ = client.grant(10)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == [f"etcd lease {lease:x}"]
        client.put(f"{JOB}roll/members/a@1", b"{}", lease=lease)
        left = leases_left(etcd.client, JOB, alone=False, patience=0)
        assert left == [f"etcd key {JOB}roll/members/a@1 under lease {lease:x}"]
        client.revoke(lease)
    assert leases_left(etcd.client, JOB, alone=True, patience=0) == []


def test_records_of_flapping_machines_do_not_count_as_left_over(etcd: EtcdServer) -> None:
    """A count of losses is kept for an hour; its writer may be killed between its lease and its key."""
    with etcd.client() as client:
        lease, _ = client.grant(3600)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.put(f"{JOB}roll/flaps/a", b"{}", lease=lease)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.revoke(lease)
