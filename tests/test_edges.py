"""Each background thread fails once with an unexpected error: it is reported, and the thread's work goes on."""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos.servers.etcd import EtcdServer
from checkpointing import Store, open_store
from elastic3d import threads
from elastic3d.clock import SYSTEM
from elastic3d.etcd import Delivery, EtcdClient, LeaseKeeper, LeaseLoss, Watch
from elastic3d.etcd import watch as etcd_watch
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.writer import MemberWriter
from elastic3d.membership.records import MemberRecord, Pulse, Report
from elastic3d.notices.notice import CloudNotice, NoticeKind
from elastic3d.notices.source import Look, NoticeSource
from elastic3d.notices.watcher import Watcher
from elastic3d.rendezvous.table import KeyTableServer
from elastic3d.snapshots.client import inventories
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.threads import Edge, ThreadFailure
from elastic3d.trust.credentials import Credentials
from elastic3d.values import Node
from elastic3d.worker.checkpoints import committer as c
from elastic3d.worker.checkpoints.committer import CommitDone, CommitFailed, Committer
from elastic3d.worker.checkpoints.housekeeping import Housekeeper, HousekeeperEvent, Verified
from elastic3d.worker.checkpoints.uploader import TilesUploaded, Uploader, WriteFailed
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.events import SlotLost
from elastic3d.worker.processes.remote import RemoteSlot
from tests.snapshots.test_serving import READER, Place, eventually
from tests.worker.checkpoints.test_committer import write
from tests.worker.checkpoints.test_housekeeping import committed
from tests.worker.checkpoints.test_uploader import Shelf, generation

Reported = queue.SimpleQueue[ThreadFailure]


class Unforeseen(Exception):
    """An error that no thread expects."""


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises the first time it is called."""
    calls: list[None] = []

    def raises_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise Unforeseen
        return function(*args, **kwargs)

    return raises_once


def failed(reported: Reported, thread: str, edge: Edge) -> None:
    """Wait for the report of this thread."""
    failure = reported.get(timeout=30)
    assert (failure.thread, failure.edge) == (thread, edge), failure
    assert failure.error.startswith("Unforeseen"), failure


def test_the_uploader_survives_an_unexpected_error(reported: Reported) -> None:
    """The write counts as failed; after a pause the slot is ready for the next one, which is written."""
    shelf, events = Shelf(5, 6), queue.SimpleQueue[TilesUploaded | WriteFailed]()
    store = once(lambda pinned, saved, last: (10, 10))
    uploader = Uploader(shelf, store, events.put, rest=lambda failures: 0.01)  # type: ignore[arg-type]
    uploader.offer(5, generation(1))
    shelf.gate.put(None)
    said = events.get(timeout=30)
    assert isinstance(said, WriteFailed)
    assert "Unforeseen" in said.error
    failed(reported, "upload-0", Edge.AGAIN)
    assert shelf.ready.get(timeout=30)
    uploader.offer(6, generation(1))
    shelf.gate.put(None)
    assert isinstance(events.get(timeout=30), TilesUploaded)
    uploader.close(10)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_the_committer_survives_an_unexpected_error(
    reported: Reported, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed commit is reported, and is made at the next try."""
    events: queue.SimpleQueue[c.CommitterEvent] = queue.SimpleQueue()
    monkeypatch.setattr(c, "commit", once(c.commit))
    committer = Committer(store, events.put)
    committer.commit(write(store, 5), 1)
    assert isinstance(events.get(timeout=30), CommitFailed)
    failed(reported, "elastic3d-commit", Edge.AGAIN)
    assert isinstance(events.get(timeout=30), CommitDone)
    committer.close(10)


def test_the_housekeeper_survives_an_unexpected_error(reported: Reported, store: Store) -> None:
    """The next checkpoint is still read back."""
    events: queue.SimpleQueue[HousekeeperEvent] = queue.SimpleQueue()
    keeper = Housekeeper(store, Saving(), once(events.put))
    keeper.committed(committed(store, 5).checkpoint, 5, 1.0)
    failed(reported, "elastic3d-keep", Edge.AGAIN)
    keeper.committed(committed(store, 6).checkpoint, 6, 2.0)
    said = events.get(timeout=30)
    assert isinstance(said, Verified)
    assert said.step == 6
    keeper.close(10)


def test_the_replicator_survives_an_unexpected_error(reported: Reported) -> None:
    """The snapshot it was sending is sent again, and held."""
    home, buddy = Place(0), Place(1)
    try:
        home.replicator._digested = once(home.digested.append)
        home.begin(1)
        buddy.begin(1)
        home.replicator.set_buddy(buddy.address)
        home.write(Mark(1, 3))
        failed(reported, "replicator", Edge.AGAIN)
        assert eventually(lambda: home.held == [Mark(1, 3)], 30)
    finally:
        home.close()
        buddy.close()


def test_the_tile_server_survives_the_failure_of_a_peers_thread(
    reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends with its connection, and whoever asks again is served."""
    monkeypatch.setattr(SnapshotMemory, "offered", once(SnapshotMemory.offered))
    home = Place(0)
    try:
        home.begin(1)
        home.write(Mark(1, 3))
        assert len(inventories([home.address], READER)) == 1
        failed(reported, "tiles-peer", Edge.ALONE)
    finally:
        home.close()


def test_an_unexpected_error_in_heartbeats_ends_the_process(reported: Reported) -> None:
    """A process that hears nobody would call everybody silent."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    links = Links("127.0.0.1", once(events.put), secret="5e" * 32, fresh=0.05)
    links.speak_for("a@1")
    links.watch(acts.WatchPeers(peers=(), expected=("b@1",)))
    failed(reported, "elastic3d-links", Edge.PROCESS)
    links.close()
    for end in (links._listener, links._wake_out, links._poll, links._arrivals):
        end.close()


def test_the_table_of_restarted_workers_survives_an_unexpected_error(
    reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on serving."""
    monkeypatch.setattr(KeyTableServer, "_accept", once(KeyTableServer._accept))
    table = KeyTableServer("127.0.0.1", Credentials(secret="5e" * 32, id="a@1"))
    socket.create_connection(("127.0.0.1", table.port), timeout=10).close()
    failed(reported, "elastic3d-table", Edge.AGAIN)
    table.close()
    assert not table._thread.is_alive()


def test_an_unreadable_message_of_a_companion_costs_its_slot(reported: Reported) -> None:
    """The keeper has lost the slot that it does not understand, and is informed."""
    name = f"elastic3d-test-{os.getpid()}-{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen()
    with listener:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        made: queue.SimpleQueue[RemoteSlot] = queue.SimpleQueue()
        threads.start(lambda: made.put(RemoteSlot(name, events, patience=30)), name="first-keeper")
        connection, _ = listener.accept()
        with connection:
            for body in (b'{"index":1,"tile_port":1,"lender":"l","pid":1}', b'{"event":"Nonsense"}'):
                connection.sendall(struct.pack("<I", len(body)) + body)
            lost = events.get(timeout=30)
    assert isinstance(lost, SlotLost)
    assert lost.slot == 1
    failure = reported.get(timeout=30)
    assert (failure.thread, failure.edge) == ("remote-slot-1", Edge.ALONE)
    made.get(timeout=30).close()


def test_the_notice_watcher_survives_an_unexpected_error(reported: Reported) -> None:
    """It goes on asking."""
    notices: queue.SimpleQueue[CloudNotice] = queue.SimpleQueue()
    notice = CloudNotice(kind=NoticeKind.AWS, action="terminate", seconds=120.0, detail="spot")
    look = once(lambda: Look(notices={"a": notice}, pause=60.0))
    source = SimpleNamespace(name="cloud", look=look, close=lambda: None)
    watcher = Watcher([cast(NoticeSource, source)], notices.put)
    failed(reported, "elastic3d-notices-0", Edge.AGAIN)
    assert notices.get(timeout=30) == notice
    watcher.close()


# Against a real etcd.


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def client(etcd: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(etcd.endpoint, namespace=f"/test/{secrets.token_hex(4)}/") as client:
        yield client


@pytest.mark.etcd
def test_a_watch_ends_when_a_delivery_fails(reported: Reported, client: EtcdClient) -> None:
    """It reports its end, which ends the member: one that hears nothing must not look alive."""
    deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
    watch = Watch(client, "a/", once(deliveries.put))
    failed(reported, "etcd-watch", Edge.ALONE)
    assert isinstance(deliveries.get(timeout=30), etcd_watch.Ended)
    watch.close()


@pytest.mark.etcd
def test_the_lease_keeper_survives_an_unexpected_error(reported: Reported, client: EtcdClient) -> None:
    """The owner of one lease fails when it is lost, and the others' leases are still kept."""
    keeper = LeaseKeeper(client)
    lost: queue.SimpleQueue[LeaseLoss] = queue.SimpleQueue()
    on_lost = once(lambda lease, loss: lost.put(loss))
    first, second = keeper.grant(2, on_lost), keeper.grant(2, on_lost)
    client.revoke(first.id)
    failed(reported, "etcd-leases", Edge.AGAIN)
    deadline = second.deadline
    assert eventually(lambda: second.deadline > deadline, 30)
    client.revoke(second.id)
    assert lost.get(timeout=30) is LeaseLoss.GONE
    keeper.close()


@pytest.mark.etcd
def test_an_unexpected_error_in_the_writer_is_reported_to_the_member(reported: Reported, client: EtcdClient) -> None:
    """The member is informed that it cannot go on."""
    events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
    me = Node(name="a", incarnation="1", address="127.0.0.1", slots=())

    def pulse() -> Pulse:
        raise Unforeseen

    writer = MemberWriter(client, "job/", me, 2.0, events.put, pulse, lambda: 0.05, SYSTEM)
    writer.start()
    writer.write(acts.PutMember(record=MemberRecord(node=me)))
    writer.write(acts.PutReport(report=Report(incarnation="1")))
    failed(reported, "elastic3d-member-writes", Edge.ALONE)
    while not isinstance(said := events.get(timeout=30), e.Broken):
        pass
    assert "Unforeseen" in said.detail
    writer.close()
