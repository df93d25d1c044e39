"""Operators' orders, written where the leader reads them, on a real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d.errors import UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.membership.orders import order_drain, order_quarantine, release
from elastic3d.membership.records import Drain, End, Flap, MemberRecord, Quarantine, decode, encode
from elastic3d.values import Node

pytestmark = pytest.mark.etcd

ROOT = "/elastic3d/run/"


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as running:
        yield running


@pytest.fixture
def client(server: EtcdServer) -> Iterator[EtcdClient]:
    """Return a client of an etcd in which node0, once restarted, and node1 on a machine of its own are registered."""
    with EtcdClient(server.endpoint) as client:
        client.delete(ROOT, prefix=True, idempotent=True)
        for name, incarnation, home in (("node0", "old", ""), ("node0", "new", ""), ("node1", "x", "rack7")):
            node = Node(name=name, incarnation=incarnation, address="h", slots=(), home=home)
            client.put(f"{ROOT}roll/members/{node.id}", encode(MemberRecord(node=node)), idempotent=True)
        yield client
        client.delete(ROOT, prefix=True, idempotent=True)


def everything(client: EtcdClient) -> dict[str, bytes]:
    return {item.key: item.value for item in client.range(ROOT)[0]}


def test_a_drain_is_for_the_present_incarnation(client: EtcdClient) -> None:
    """A process started later under that name is not meant."""
    order_drain(client, ROOT, "node0", seconds=25.0, by="ann", reason="disk")
    key = f"{ROOT}roll/drains/node0"
    drain = decode(Drain, everything(client)[key], key)
    assert replace(drain, at=0.0) == Drain(seconds=25.0, reason="disk", by="ann", incarnation="new")
    assert drain.at > 0


def test_an_unknown_node_is_refused_and_the_known_ones_are_named(client: EtcdClient) -> None:
    """Nothing is written."""
    before = everything(client)
    with pytest.raises(UsageError, match=r"no node 'node7'.*node0, node1"):
        order_drain(client, ROOT, "node7", seconds=25.0, by="ann")
    with pytest.raises(UsageError, match=r"no node or machine 'node7'.*node0, node1, rack7"):
        order_quarantine(client, ROOT, "node7", seconds=25.0, by="ann")
    with pytest.raises(UsageError, match="nothing is ordered of 'node0'; there are orders for none"):
        release(client, ROOT, "node0")
    assert everything(client) == before


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_malformed_duration_is_refused(client: EtcdClient, seconds: float) -> None:
    """Before anything is written."""
    before = everything(client)
    with pytest.raises(UsageError, match="give more than 0 s"):
        order_drain(client, ROOT, "node0", seconds=seconds, by="ann")
    with pytest.raises(UsageError, match="give more than 0 s"):
        order_quarantine(client, ROOT, "node0", seconds=seconds, by="ann")
    assert everything(client) == before


def test_a_quarantine_is_for_the_machine_and_expires(client: EtcdClient) -> None:
    """The key has the machine's name and a lease of its own."""
    assert order_quarantine(client, ROOT, "node1", seconds=60.0, by="ann", reason="flaky") == "rack7"
    key = f"{ROOT}roll/quarantine/rack7"
    item = client.get(key)
    assert item is not None
    assert decode(Quarantine, item.value, key) == Quarantine(seconds=60.0, reason="flaky", by="ann")
    left = client.time_to_live(item.lease)
    assert left is not None
    assert 50 <= left <= 60
    assert order_quarantine(client, ROOT, "rack7", seconds=60.0, by="ann") == "rack7"


def test_a_shorter_quarantine_takes_no_longer_one_back(client: EtcdClient) -> None:
    """A machine whose device computes wrongly is out for a day, and stays so if somebody keeps it out for a minute."""
    order_quarantine(client, ROOT, "node1", seconds=600.0, by="node0", reason="a device of it computes wrongly")
    with pytest.raises(UsageError, match=r"out already, for another \d+ s \(a device .* release node1` takes"):
        order_quarantine(client, ROOT, "node1", seconds=60.0, by="ann")
    release(client, ROOT, "node1")
    assert order_quarantine(client, ROOT, "node1", seconds=60.0, by="ann") == "rack7"
    client.put(f"{ROOT}roll/quarantine/rack9", encode(Quarantine(seconds=60.0)), idempotent=True)
    with pytest.raises(UsageError, match="rack9 is kept out already, for good"):
        order_quarantine(client, ROOT, "rack9", seconds=60.0, by="ann")


def test_release_revokes_orders_and_forgets_losses(client: EtcdClient) -> None:
    """By the name of the node or of its machine, which may have no node now."""
    order_drain(client, ROOT, "node1", seconds=25.0, by="ann")
    order_quarantine(client, ROOT, "node1", seconds=60.0, by="ann")
    client.put(f"{ROOT}roll/flaps/rack7", encode(Flap(id="node1@w", count=3)), idempotent=True)
    assert release(client, ROOT, "node1") == ("drain of node1", "quarantine of rack7", "losses of rack7")
    assert sorted(key.rpartition("/")[2] for key in everything(client)) == ["node0@new", "node0@old", "node1@x"]
    client.put(f"{ROOT}roll/quarantine/rack9", encode(Quarantine(seconds=60.0)), idempotent=True)
    assert release(client, ROOT, "rack9") == ("quarantine of rack9",)


def test_a_job_that_is_over_takes_no_orders(client: EtcdClient) -> None:
    """The error says so."""
    client.put(f"{ROOT}board/end", encode(End(failed=False)), idempotent=True)
    with pytest.raises(UsageError, match="over"):
        order_drain(client, ROOT, "node0", seconds=25.0, by="ann")


def test_garbage_under_a_members_key_does_not_stop_orders(client: EtcdClient) -> None:
    """It stands for no node that could be ordered."""
    client.put(f"{ROOT}roll/members/node5@y", b"garbage", idempotent=True)
    order_drain(client, ROOT, "node0", seconds=25.0, by="ann")
    with pytest.raises(UsageError, match=r"registered are node0, node1$"):
        order_drain(client, ROOT, "node5", seconds=25.0, by="ann")
