"""Leases: kept while all is well, given up in time when not, and never held past their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdCluster, EtcdServer
from elastic3d.etcd import EtcdClient, Lease, LeaseGone, LeaseKeeper, LeaseLoss
from elastic3d.etcd.lease import BEATS
from tests.etcd.etcd_helpers import wait_until

pytestmark = pytest.mark.etcd


class Lost:
    """The losses that a keeper reported, and when."""

    def __init__(self) -> None:
        self.said: list[tuple[int, LeaseLoss, float]] = []
        self.threads: set[str] = set()

    def __call__(self, lease: Lease, loss: LeaseLoss) -> None:
        self.said.append((lease.id, loss, time.monotonic()))
        self.threads.add(threading.current_thread().name)


def test_leases_are_kept_past_their_time_to_live(client: EtcdClient) -> None:
    """Twenty leases on one stream outlive several times to live; their deadlines advance; no loss is reported."""
    before = set(threading.enumerate())
    keeper, lost = LeaseKeeper(client), Lost()
    leases = [keeper.grant(1, lost) for _ in range(20)]
    for lease in leases:
        client.put(f"k/{lease.id}", b"", lease.id)
    ttl = max(lease.ttl for lease in leases)
    first = leases[0].deadline
    time.sleep(2.2 * ttl)
    assert len(client.range("k/")[0]) == 20
    assert all(lease.held(time.monotonic()) for lease in leases)
    assert leases[0].deadline > first
    assert sum(thread.name == "etcd-lease-answers" for thread in set(threading.enumerate()) - before) == 1
    keeper.revoke(leases[0])
    assert len(client.range("k/")[0]) == 19
    for lease in leases[1:]:
        client.revoke(lease.id)  # behind the keeper's back
    wait_until(lambda: len(lost.said) == 19)
    assert {loss for _, loss, _ in lost.said} == {LeaseLoss.GONE}
    assert leases[0].id not in {number for number, _, _ in lost.said}
    assert lost.threads == {"etcd-leases"}
    assert not any(lease.held(time.monotonic()) for lease in leases[1:])
    keeper.close()


def test_a_lease_expires_after_its_keeper_is_closed(client: EtcdClient) -> None:
    """Closing neither revokes nor keeps it: the keys go when the time to live is over."""
    keeper, lost = LeaseKeeper(client), Lost()
    lease = keeper.grant(1, lost)
    client.put("k", b"", lease.id)
    keeper.close()
    assert client.get("k") is not None
    wait_until(lambda: client.get("k") is None, lease.ttl + 3)
    assert not lost.said


def test_a_lease_is_given_up_before_the_server_can_end_it(binary: Path) -> None:
    """etcd stops answering: the loss is reported within one time to live since the last effective keepalive."""
    with EtcdServer(binary=binary) as server, EtcdClient(server.endpoints) as client:
        keeper, lost = LeaseKeeper(client), Lost()
        lease = keeper.grant(2, lost)
        # Between two keepalives: after one, the keeper would have little more than its margin to be heard in.
        time.sleep(2.5 * lease.ttl / BEATS)
        server.pause()
        paused = time.monotonic()
        wait_until(lambda: lost.said)
        _, loss, at = lost.said[0]
        assert loss is LeaseLoss.EXPIRED
        assert at < paused + lease.ttl
        assert not lease.held(at)
        server.resume()
        renewed = keeper.grant(2, lost, budget=10.0)
        time.sleep(2.2)
        assert renewed.held(time.monotonic())
        assert len(lost.said) == 1
        keeper.close()


def test_a_lease_survives_a_server_restart(binary: Path) -> None:
    """Killed and restarted on its data within the time to live: the lease, its key and its keeper go on."""
    with EtcdServer(binary=binary) as server, EtcdClient(server.endpoints) as client:
        keeper, lost = LeaseKeeper(client), Lost()
        lease = keeper.grant(3, lost)
        client.put("k", b"", lease.id)
        server.restart()
        time.sleep(3.5)
        assert client.get("k") is not None
        assert lease.held(time.monotonic())
        assert not lost.said
        keeper.close()


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_a_lease_survives_the_loss_of_etcds_leader(one_binary: Path, fault: str) -> None:
    """In a cluster of three the leader dies or stops: keepalives move to the others in time."""
    with EtcdCluster(3, binary=one_binary) as cluster, EtcdClient(cluster.endpoints) as client:
        keeper, lost = LeaseKeeper(client), Lost()
        lease = keeper.grant(5, lost)
        client.put("k", b"", lease.id)
        leader = cluster.leader()
        leader.pause() if fault == "pause" else leader.kill()
        time.sleep(5.5)
        assert not lost.said
        assert lease.held(time.monotonic())
        assert client.get("k") is not None
        keeper.close()


CHILD = """
import sys, time
from elastic3d.etcd import EtcdClient, LeaseGone, LeaseKeeper
with EtcdClient(sys.argv[1]) as client:
    keeper = LeaseKeeper(client)
    lease = keeper.grant(2, lambda lease, loss: print("lost", loss, flush=True))
    client.put("k", b"mine", lease.id)
    print("holding", flush=True)
    sys.stdin.readline()
    print("held", lease.held(time.monotonic()), flush=True)
    try:
        client.put("k", b"late", lease.id)
        print("written", flush=True)
    except LeaseGone:
        print("fenced", flush=True)
"""


def test_a_process_stopped_past_its_lease_wakes_without_it(one_binary: Path) -> None:
    """After SIGSTOP for longer than the time to live, the loss is reported once and writes under the lease fail."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        command = [sys.executable, "-c", CHILD, server.endpoints[0]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                assert child.stdout.readline() == "holding\n"
                time.sleep(0.5)
                os.kill(child.pid, signal.SIGSTOP)
                wait_until(lambda: client.get("k") is None)
                os.kill(child.pid, signal.SIGCONT)
                said = [child.stdout.readline()]
                child.stdin.write("\n")
                child.stdin.flush()
                said += child.stdout.readlines()
            finally:
                child.kill()
        assert said[0] in ("lost expired\n", "lost gone\n")
        assert said[1:] == ["held False\n", "fenced\n"]
        assert client.get("k") is None


def test_granting_a_lease_without_etcd_is_an_error(one_binary: Path) -> None:
    """The keeper can still grant the next one."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        keeper = LeaseKeeper(client)
        lease = keeper.grant(2)
        keeper.revoke(lease)
        with pytest.raises(LeaseGone):
            client.put("k", b"", lease.id)
        server.restart()
        assert keeper.grant(2, budget=10.0).held(time.monotonic())
        keeper.close()
