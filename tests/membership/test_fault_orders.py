"""Orders of faults on a real etcd: checked before they are written, taken once or never, gone with their lease."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.errors import MembershipError, UsageError
from elastic3d.etcd import EtcdClient, KeyValue, LeaseGone
from elastic3d.membership import events as e
from elastic3d.membership import reading
from elastic3d.membership.fault_orders import GivenOrder, order_fault, take, wait_for_answer
from elastic3d.membership.injection import FaultAnswer, FaultOrder, ordered
from elastic3d.membership.records import End, MemberRecord, encode
from elastic3d.values import ModelProfile, Node, Slot

pytestmark = pytest.mark.etcd

ROOT = "/elastic3d/run/"
PROFILE = ModelProfile(blocks=2, parameters=8, micro_batches=2, micro_batch=1, digest="d")
KILL = ordered("kill-trainer", by="ann@there")


def member(name: str, *, profile: ModelProfile | None = PROFILE, chaos: bool = True) -> MemberRecord:
    node = Node(name=name, incarnation="x", address="h", slots=(Slot(tile_port=1),))
    return MemberRecord(node=node, profile=profile, chaos=chaos)


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as running:
        yield running


@pytest.fixture
def client(server: EtcdServer) -> Iterator[EtcdClient]:
    """Return a client of an etcd with one node that allows it, one that does not, and one in mode restart."""
    with EtcdClient(server.endpoint) as client:
        client.delete(ROOT, prefix=True, idempotent=True)
        for record in (member("node0"), member("node1", chaos=False), member("node2", profile=None, chaos=False)):
            client.put(f"{ROOT}roll/members/{record.node.id}", encode(record), idempotent=True)
        yield client
        client.delete(ROOT, prefix=True, idempotent=True)


def written(client: EtcdClient) -> tuple[KeyValue, ...]:
    return client.range(ROOT + keys.FAULTS)[0]


def heard(client: EtcdClient) -> GivenOrder:
    """Return the only order as a keeper that watches the board reads it."""
    (item,) = written(client)
    event = reading.read(ROOT, item)
    assert isinstance(event, e.FaultOrdered)
    return GivenOrder(node=event.id, key=event.key, revision=event.revision, lease=event.lease, order=event.order)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("node1", "^node1 was not started with --rdzv-conf=chaos=allow"),
        ("node2", "^node2 runs in mode restart"),
        ("nod0", r"no node 'nod0' in this job; did you mean 'node0'\?; registered are node0, node1, node2"),
    ],
)
def test_a_node_that_does_not_allow_it_is_refused_by_name(client: EtcdClient, name: str, message: str) -> None:
    """Nothing is written."""
    with pytest.raises(UsageError, match=message):
        order_fault(client, ROOT, name, KILL)
    assert written(client) == ()


def test_a_slot_that_is_not_there_is_refused(client: EtcdClient) -> None:
    """The message says how many there are."""
    with pytest.raises(UsageError, match="node0: there is no slot 1: the node has 1"):
        order_fault(client, ROOT, "node0", ordered("kill-trainer", slot=1))
    assert written(client) == ()


def test_a_job_that_is_over_takes_no_orders(client: EtcdClient) -> None:
    """Even if a member's key is still there."""
    client.put(ROOT + keys.END, encode(End(failed=False)), idempotent=True)
    with pytest.raises(UsageError, match="is over"):
        order_fault(client, ROOT, "node0", KILL)


def test_an_order_is_taken_once(client: EtcdClient) -> None:
    """The keeper hears who asks, answers, and cannot answer a second time; then nothing is left in etcd."""
    given = order_fault(client, ROOT, "node0", KILL)
    assert heard(client) == given
    assert given.node == "node0@x"
    assert take(client, given, FaultAnswer())
    assert not take(client, given, FaultAnswer(refused="another"))
    wait_for_answer(client, ROOT, given)
    assert written(client) == ()
    assert not take(client, given, FaultAnswer())


def test_an_answer_that_comes_while_it_is_waited_for_is_heard(client: EtcdClient) -> None:
    """The command returns as soon as the node does it."""
    given = order_fault(client, ROOT, "node0", KILL)
    keeper = threading.Timer(0.3, lambda: take(client, given, FaultAnswer()))
    keeper.start()
    wait_for_answer(client, ROOT, given)
    keeper.join()


def test_a_keepers_refusal_is_the_commands(client: EtcdClient) -> None:
    """With the node's name."""
    given = order_fault(client, ROOT, "node0", KILL)
    take(client, given, FaultAnswer(refused="no trainer runs on slot 0 now"))
    with pytest.raises(UsageError, match="node0 refuses: no trainer runs on slot 0 now"):
        wait_for_answer(client, ROOT, given)


@pytest.mark.parametrize(("gone", "why"), [(True, "has left the job meanwhile"), (False, "may be stopped, or cut off")])
def test_an_order_without_an_answer_is_withdrawn(client: EtcdClient, gone: bool, why: str) -> None:
    """A keeper that reads it late cannot take it any more."""
    given = order_fault(client, ROOT, "node0", KILL)
    if gone:
        client.delete(ROOT + keys.member("node0@x"))
    with pytest.raises(MembershipError, match=f"node0 did not answer within 0.2 s.*{why}.*nothing was done"):
        wait_for_answer(client, ROOT, given, patience=0.2)
    assert written(client) == ()
    assert not take(client, given, FaultAnswer())


def test_an_order_whose_lease_is_over_is_not_taken(client: EtcdClient) -> None:
    """Whoever ordered it may be gone: the lease alone decides."""
    given = order_fault(client, ROOT, "node0", KILL)
    client.revoke(given.lease)
    assert not take(client, given, FaultAnswer())
    with pytest.raises(MembershipError, match="gone from etcd"):
        wait_for_answer(client, ROOT, given)


def test_a_key_beyond_its_lease_cannot_be_answered(client: EtcdClient) -> None:
    """If somebody wrote the key under another lease, the answer, under the first, is an error of etcd's."""
    given = order_fault(client, ROOT, "node0", KILL)
    revision = client.put(given.key, encode(KILL), client.grant(60)[0])
    client.revoke(given.lease)
    with pytest.raises(LeaseGone):
        take(client, replace(given, revision=revision), FaultAnswer())


def test_garbage_under_an_orders_key_is_named_for_the_sweep(client: EtcdClient) -> None:
    """The leader sweeps it; nobody acts on it."""
    client.put(ROOT + keys.fault("node0@x", "1"), b"burn")
    (item,) = written(client)
    event = reading.read(ROOT, item)
    assert event == e.Garbage(key=keys.fault("node0@x", "1"), revision=item.mod_revision)
    assert reading.gone(ROOT, item.key, 9) is None


def test_an_order_of_a_fault_that_only_others_know_can_be_read(client: EtcdClient) -> None:
    """So that the keeper can say so."""
    client.put(ROOT + keys.fault("node0@x", "1"), encode(FaultOrder(fault="set-on-fire")))
    assert heard(client).order.fault == "set-on-fire"
