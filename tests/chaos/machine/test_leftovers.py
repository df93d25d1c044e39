"""What counts as left over in etcd: leases and keys of living members, but not what has to outlive a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos.machine.leftovers import keys_left, leases_left
from chaos.machine.processes import wait_until
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


@pytest.mark.parametrize("key", ["roll/flaps/a", "refused/a"])
def test_records_that_last_for_a_time_do_not_count_as_left_over(key: str, etcd: EtcdServer) -> None:
    """Such as a count of losses, kept for an hour; its writer may be killed between its lease and its key."""
    with etcd.client() as client:
        lease, _ = client.grant(3600)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.put(f"{JOB}{key}", b"{}", lease=lease)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.revoke(lease)


def test_a_record_that_was_replaced_does_not_count_as_left_over_however_little_its_lease_has_left(
    etcd: EtcdServer,
) -> None:
    """Such as an end of two minutes whose write was repeated: what counts is how long the lease was granted for."""
    with etcd.client() as client:
        lease, _ = client.grant(61)
        assert wait_until(lambda: (client.time_to_live(lease) or 0) < 60, 10.0)
        assert leases_left(etcd.client, JOB, alone=True, patience=0) == []
        client.revoke(lease)


def test_a_members_key_that_has_no_lease_counts_as_left_over(etcd: EtcdServer) -> None:
    """Nothing would ever end it; what an ended job leaves to the next one does not count, nor what has a lease."""
    root = "/elastic3d/keyless/"
    with etcd.client() as client:
        lease, _ = client.grant(60)
        client.put(f"{root}roll/members/a@1", b"{}", lease=lease)
        for key in ("board/end", "board/secret", "board/generation", "board.whole/generation", "board/tombs/a@1"):
            client.put(root + key, b"{}")
        for key in ("goodput", "history/0000000001.0", "verdicts/0000000001.0", "roll/drains/a"):
            client.put(root + key, b"{}")
        assert keys_left(etcd.client, root) == []
        client.put(f"{root}roll/reports/b@2", b"{}")
        client.put(f"{root}board/leader", b"{}")
        left = [f"etcd key {root}board/leader without a lease", f"etcd key {root}roll/reports/b@2 without a lease"]
        assert sorted(keys_left(etcd.client, root)) == left
        client.revoke(lease)
