"""Watches over members that stop, die and lose data: no change is lost or repeated, and every gap is marked."""

from __future__ import annotations

import queue
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdCluster, EtcdMember, EtcdServer
from elastic3d.etcd import Change, Changes, Connected, Delivery, Disconnected, EtcdClient, LeaseKeeper, Snapshot, Watch
from elastic3d.etcd import watch as etcd_watch
from elastic3d.etcd.breaker import ELECTION
from tests.etcd.etcd_helpers import Relay, wait_until

pytestmark = pytest.mark.etcd


class Seen:
    """What a watch delivered, in order."""

    def __init__(self) -> None:
        self.all: list[Delivery] = []

    def __call__(self, delivery: Delivery) -> None:
        self.all.append(delivery)

    def of(self, kind: type) -> list[Delivery]:
        """Return the deliveries of one kind."""
        return [delivery for delivery in self.all if isinstance(delivery, kind)]

    @property
    def changes(self) -> list[Change]:
        """All changes, in order."""
        return [change for delivery in self.all if isinstance(delivery, Changes) for change in delivery.changes]


@contextmanager
def watching(client: EtcdClient, prefix: str) -> Iterator[Seen]:
    """A connected watch."""
    seen = Seen()
    watch = Watch(client, prefix, seen)
    try:
        wait_until(lambda: seen.of(Connected))
        yield seen
    finally:
        watch.close()


def test_a_watch_begins_with_a_snapshot(client: EtcdClient) -> None:
    """First the present keys, without a gap; then that it is connected.

    Then every change of the prefix, and no other.
    """
    client.put("a/1", b"old")
    client.put("b", b"")
    with watching(client, "a/") as seen:
        first, second = seen.all[:2]
        assert isinstance(first, Snapshot)
        assert [(kv.key, kv.value) for kv in first.kvs] == [("a/1", b"old")]
        assert not first.gap
        assert isinstance(second, Connected)
        written = client.put("a/2", b"new", client.grant(60)[0])
        client.put("b", b"x")
        client.delete("a/1")
        wait_until(lambda: len(seen.changes) == 2)
        put, deleted = seen.changes
        assert put.kv is not None
        assert (put.key, put.kv.value, put.kv.version, put.revision) == ("a/2", b"new", 1, written)
        assert put.kv.lease
        assert (deleted.key, deleted.kv, deleted.revision) == ("a/1", None, written + 2)
        assert len(seen.all) == 4


def test_a_receiver_may_ask_for_another_listing(client: EtcdClient) -> None:
    """What it cannot interpret arrives again as a snapshot, with keys that are listed beside it but never watched."""
    seen = Seen()

    def deliver(delivery: Delivery) -> None:
        seen(delivery)
        if isinstance(delivery, Changes) and len(seen.of(Snapshot)) == 1:
            raise etcd_watch.ListAgain

    client.put("c.beside", b"")
    watch = Watch(client, "c/", deliver, listed="c")
    wait_until(lambda: seen.of(Connected))
    client.put("c.beside", b"new")
    client.put("c/1", b"")
    wait_until(lambda: len(seen.of(Snapshot)) == 2)
    client.put("c/2", b"")
    wait_until(lambda: len(seen.changes) == 2)
    watch.close()
    assert [change.key for change in seen.changes] == ["c/1", "c/2"]
    first, again = seen.of(Snapshot)
    assert isinstance(first, Snapshot)
    assert isinstance(again, Snapshot)
    assert (first.gap, [kv.key for kv in first.kvs]) == (False, ["c.beside"])
    assert (again.gap, [(kv.key, kv.value) for kv in again.kvs]) == (True, [("c.beside", b"new"), ("c/1", b"")])
    assert len(seen.of(Connected)) == 1


def test_changes_of_one_revision_arrive_together(client: EtcdClient) -> None:
    """Deleting a prefix is one delivery."""
    for number in range(5):
        client.put(f"k{number}", b"")
    with watching(client, "") as seen:
        client.delete("", prefix=True)
        wait_until(lambda: seen.changes)
        (delivery,) = seen.of(Changes)
        assert isinstance(delivery, Changes)
        assert len(delivery.changes) == 5
        assert {change.revision for change in delivery.changes} == {delivery.revision}


def test_a_slow_receiver_is_not_taken_for_a_silent_member(one_binary: Path) -> None:
    """A delivery that takes longer than the silence limit costs neither a change nor the connection."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        _receive_slowly(client)


def _receive_slowly(client: EtcdClient) -> None:
    seen = Seen()

    def slowly(delivery: Delivery) -> None:
        seen(delivery)
        if isinstance(delivery, Changes) and delivery.changes[0].key == "k0":
            time.sleep(2.0)

    watch = Watch(client, "", slowly)
    wait_until(lambda: seen.of(Connected))
    for number in range(20):
        client.put(f"k{number}", b"")
    wait_until(lambda: len(seen.changes) == 20)
    watch.close()
    assert [change.key for change in seen.changes] == [f"k{number}" for number in range(20)]
    assert len(seen.of(Connected)) == 1
    assert not seen.of(Disconnected)


def test_a_receiver_may_close_its_watch_during_a_delivery(client: EtcdClient) -> None:
    """It receives nothing more."""
    box: queue.Queue[Watch] = queue.Queue()
    seen = Seen()

    def once(delivery: Delivery) -> None:
        seen(delivery)
        box.get().close()

    box.put(Watch(client, "", once))
    wait_until(lambda: seen.all)
    client.put("k", b"")
    time.sleep(0.1)
    assert len(seen.all) == 1


class Writer:
    """Puts keys of its own one after another, as fast as etcd accepts them, until stopped."""

    def __init__(self, client: EtcdClient) -> None:
        self.written = 0
        self.slowest = 0.0
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            began = time.monotonic()
            self._client.put(f"k/{self.written}", b"", idempotent=True, budget=20.0)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.written += 1

    def stop(self) -> int:
        """Stop, and return how many were written."""
        self._stop.set()
        self._thread.join()
        return self.written


def assert_nothing_lost(client: EtcdClient, seen: Seen, count: int) -> None:
    """Assert that every write in etcd was delivered once, in order, without a gap."""
    wait_until(lambda: f"k/{count - 1}" in {change.key for change in seen.changes})
    kvs, _ = client.range("k/")
    assert len(kvs) == count
    assert len(seen.changes) == sum(kv.version for kv in kvs), "a write sent twice is two changes"
    revisions = [change.revision for change in seen.changes]
    assert revisions == sorted(set(revisions))
    assert len(seen.of(Snapshot)) == 1


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_no_change_is_lost_when_the_watched_member_stops(one_binary: Path, fault: str) -> None:
    """Under writes, the member that serves the watch is stopped (SIGSTOP, silent) or killed: the watch moves on."""
    with EtcdCluster(3, binary=one_binary) as cluster, EtcdClient(cluster.endpoints) as client:
        with watching(client, "k/") as seen:
            writer = Writer(client)
            try:
                wait_until(lambda: len(seen.changes) > 50)
                (connected,) = seen.of(Connected)
                assert isinstance(connected, Connected)
                victim = cluster.members[cluster.endpoints.index(connected.endpoint)]
                victim.pause() if fault == "pause" else victim.kill()
                known = len(seen.changes)
                wait_until(lambda: len(seen.changes) > known + 200, 15.0)
            finally:
                count = writer.stop()
            assert_nothing_lost(client, seen, count)
            assert not seen.of(Disconnected), "moving to the next member is not a disconnection"


def test_a_slow_read_is_not_reported_as_a_disconnection() -> None:
    """Until it lasts: a read that moves to the next member may meet an election, and use up its budget."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with EtcdClient(f"127.0.0.1:{listener.getsockname()[1]}") as client:
            seen, began = Seen(), time.monotonic()
            watch = Watch(client, "k/", seen)
            wait_until(lambda: seen.of(Disconnected), 60.0)
            assert time.monotonic() - began >= etcd_watch.UNSERVED
            watch.close()


def test_an_election_is_not_reported_as_a_disconnection(one_binary: Path) -> None:
    """The leader, which serves the watch, is silent, and the others have none. It is reported if it lasts."""
    quick = ("--heartbeat-interval=100", "--election-timeout=500")
    with EtcdCluster(5, binary=one_binary, options=quick) as cluster:
        leader = cluster.leader()
        two, three, *late = (member for member in cluster.members if member is not leader)
        with EtcdClient(leader.endpoint) as client:
            client.put("k/0", b"")
        endpoints = [leader.endpoint, two.endpoint, three.endpoint]
        with EtcdClient(endpoints) as client:
            first = client.session.order().index(0)
        endpoints = endpoints[first:] + endpoints[:first]
        with EtcdClient(endpoints) as client, watching(client, "k/") as seen:
            wait_until(lambda: seen.of(Connected))
            assert [event.endpoint for event in seen.of(Connected) if isinstance(event, Connected)] == [leader.endpoint]
            for member in (leader, *late):
                member.pause()
            wait_until(lambda: seen.of(Disconnected), 15.0)
            now = time.monotonic()
            (lost,) = seen.of(Disconnected)
            assert isinstance(lost, Disconnected)
            # The next member is asked after a second of silence of the leader.
            assert now - lost.since >= 1.0 + ELECTION
            for member in late:
                member.resume()
            client.put("k/1", b"", idempotent=True, budget=20.0)
            wait_until(lambda: seen.changes, 15.0)
            assert len(seen.of(Connected)) == 2


def test_a_watch_resumes_after_a_server_restart(binary: Path) -> None:
    """The watch reports the loss and the return, and delivers what it missed."""
    with EtcdServer(binary=binary) as server, EtcdClient(server.endpoints) as client:
        client.put("k/0", b"")
        with watching(client, "k/") as seen:
            client.put("k/1", b"")
            wait_until(lambda: seen.changes)
            began = time.monotonic()
            server.kill()
            wait_until(lambda: seen.of(Disconnected))
            (lost,) = seen.of(Disconnected)
            assert isinstance(lost, Disconnected)
            assert abs(lost.since - began) < 1.0
            server.restart()
            with EtcdClient(server.endpoints) as other:
                other.put("k/2", b"")
            wait_until(lambda: len(seen.changes) == 2)
            assert [change.key for change in seen.changes] == ["k/1", "k/2"]
            assert len(seen.of(Connected)) == 2
            assert len(seen.of(Snapshot)) == 1


def test_a_stopped_server_is_noticed(one_binary: Path) -> None:
    """After about 1.5 s of silence (SIGSTOP) the watch reports the disconnection; then it catches up."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        with watching(client, "k/") as seen:
            # An answer to begin with: a question that has waited for some time already would be given up sooner.
            client.put("k/0", b"")
            wait_until(lambda: seen.changes)
            began = time.monotonic()
            server.pause()
            wait_until(lambda: seen.of(Disconnected), 5.0)
            assert 1.0 < time.monotonic() - began < 3.5
            server.resume()
            client.put("k/1", b"", idempotent=True)
            wait_until(lambda: len(seen.of(Connected)) == 2)
            wait_until(lambda: seen.changes[-1].key == "k/1")
            assert len(seen.of(Disconnected)) == 1


def test_a_watch_beside_a_lease_sends_almost_nothing(client: EtcdClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answered keepalives are signs of life enough: an idle member costs etcd only its keepalives."""
    asked: list[float] = []
    ask = etcd_watch._Feed.ask_progress

    def noted(feed: etcd_watch._Feed) -> None:
        asked.append(time.monotonic())
        ask(feed)

    monkeypatch.setattr(etcd_watch._Feed, "ask_progress", noted)
    # A keepalive is sent every 0.6 s; on a busy machine its answer comes later.
    monkeypatch.setattr(etcd_watch, "QUIET", 3.0)
    monkeypatch.setattr(etcd_watch, "OWN_QUIET", 60.0)
    with watching(client, "k/") as seen:
        leases = LeaseKeeper(client)
        lease = leases.grant(2.0)
        time.sleep(4.0)
        assert not asked
        monkeypatch.setattr(etcd_watch, "QUIET", 0.5)
        leases.revoke(lease)
        leases.close()
        wait_until(lambda: len(asked) > 3, 30.0)
        assert len(seen.of(Connected)) == 1
        assert not seen.of(Disconnected)


def test_a_broken_watch_connection_is_noticed_beside_a_live_lease(one_binary: Path) -> None:
    """As when a router forgets it: the lease's goes on, and the watch loses nothing, if some seconds later."""
    with EtcdServer(binary=one_binary) as server, Relay(server.endpoint) as relay:
        with EtcdClient(relay.endpoint) as client, watching(client, "k/") as seen:
            assert relay.connections == 2  # calls go over the first
            leases = LeaseKeeper(client)
            lease = leases.grant(2.0)
            wait_until(lambda: relay.connections == 3)
            relay.stall(1)
            client.put("k/1", b"")
            wait_until(lambda: seen.changes, 15.0)
            assert lease.held(time.monotonic())
            leases.close()


def test_a_slow_server_is_not_flooded_with_connections(one_binary: Path) -> None:
    """Mute for ten seconds, it gets a few new connections, not one a second from each client."""
    with EtcdServer(binary=one_binary) as server, Relay(server.endpoint) as relay:
        with EtcdClient(relay.endpoint) as client, watching(client, "k/") as seen:
            leases = LeaseKeeper(client)
            leases.grant(4.0)
            before = relay.connections
            server.pause()
            time.sleep(10.0)
            dialled = relay.connections - before
            server.resume()
            client.put("k/1", b"", idempotent=True, budget=20.0)
            wait_until(lambda: seen.changes)
            leases.close()
    assert dialled <= 12


def test_compaction_under_a_watch_is_a_marked_gap(binary: Path) -> None:
    """Changes that were compacted away are lost: the prefix is listed again, and the snapshot is marked with a gap."""
    with EtcdCluster(1, binary=binary) as server, EtcdClient(server.endpoints) as client:
        blocked, go = threading.Event(), threading.Event()
        seen = Seen()

        def deliver(delivery: Delivery) -> None:
            seen(delivery)
            if isinstance(delivery, Snapshot) and not delivery.gap:
                blocked.set()
                assert go.wait(10)

        client.put("k/old", b"")
        watch = Watch(client, "k/", deliver)
        assert blocked.wait(10)
        # Between its listing and its stream, which looks like a long disconnection to the watch.
        client.delete("k/old")
        for number in range(3):
            client.put(f"k/{number}", b"")
        client.compact(client.range("k/")[1])
        go.set()
        wait_until(lambda: len(seen.of(Snapshot)) == 2)
        again = seen.of(Snapshot)[1]
        assert isinstance(again, Snapshot)
        assert again.gap
        assert [kv.key for kv in again.kvs] == ["k/0", "k/1", "k/2"]
        client.put("k/3", b"")
        wait_until(lambda: [change.key for change in seen.changes] == ["k/3"])
        watch.close()


def test_a_watch_without_a_server_starts_disconnected(one_binary: Path) -> None:
    """It may be opened before etcd is up: it reports Disconnected once, then begins with its snapshot."""
    with EtcdServer(binary=one_binary) as server:
        server.kill()
        with EtcdClient(server.endpoints) as client:
            seen = Seen()
            watch = Watch(client, "k/", seen)
            wait_until(lambda: seen.all)
            assert isinstance(seen.all[0], Disconnected)
            server.restart()
            wait_until(lambda: seen.of(Connected))
            assert [type(delivery) for delivery in seen.all] == [Disconnected, Snapshot, Connected]
            watch.close()


def changed_since(seen: Seen, key: str) -> bool:
    """Return whether a change of `key` was delivered after the newest snapshot."""
    last = max(index for index, delivery in enumerate(seen.all) if isinstance(delivery, Snapshot))
    after = [change for delivery in seen.all[last:] if isinstance(delivery, Changes) for change in delivery.changes]
    return key in [change.key for change in after]


def test_a_watch_reports_an_etcd_that_comes_back_empty(one_binary: Path) -> None:
    """Its revisions restart: the keys are listed and marked as rolled back, and changes flow again."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        for number in range(20):
            client.put("a/1", str(number).encode())
        with watching(client, "a/") as seen:
            server.restore(None)
            wait_until(lambda: len(seen.of(Snapshot)) == 2, 20)
            second = seen.of(Snapshot)[1]
            assert isinstance(second, Snapshot)
            assert (second.rolled_back, second.gap, second.kvs) == (True, True, ())
            client.put("a/2", b"")
            wait_until(lambda: changed_since(seen, "a/2"))


def test_a_watch_reports_an_older_backup(one_binary: Path) -> None:
    """Even if so much was written by the time it resumes that the revisions it knows exist again."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        client.put("a/1", b"old")
        backup = server.back_up()
        with watching(client, "a/") as seen:
            client.put("a/1", b"new")
            client.put("a/2", b"new")
            wait_until(lambda: len(seen.changes) == 2)
            server.restore(went_on(server, backup, writes=6))
            wait_until(lambda: len(seen.of(Snapshot)) == 2, 20)
            second = seen.of(Snapshot)[1]
            assert isinstance(second, Snapshot)
            assert second.rolled_back
            assert {kv.key: kv.value for kv in second.kvs} == {"a/1": b"old"}
            client.put("a/3", b"")
            wait_until(lambda: changed_since(seen, "a/3"))


def went_on(server: EtcdServer, backup: Path, *, writes: int) -> Path:
    """Return a backup of a history that continued from `backup` with other writes than the server's own."""
    copy = backup.with_name(backup.name + "-later")
    shutil.copytree(backup, copy)
    member = server.members[0]
    own = f"--data-dir={member.directory / member.name}"
    other = EtcdMember("other", member.directory)
    with EtcdServer(binary=server.binary) as free:
        free.kill()
        other.port = free.members[0].port
        moved = {
            own: f"--data-dir={copy}",
            f"--listen-client-urls={member.endpoint}": f"--listen-client-urls={other.endpoint}",
        }
        peer = f"--listen-peer-urls=http://127.0.0.1:{member.peer_port}"
        moved[peer] = f"--listen-peer-urls=http://127.0.0.1:{free.members[0].peer_port}"
        other.arguments = [moved.get(argument, argument) for argument in member.arguments]
        other.start()
        try:
            with EtcdClient(other.endpoint, budget=20.0) as client:
                wait_until(other.healthy, 20)
                for number in range(writes):
                    client.put(f"b/{number}", b"", idempotent=True)
        finally:
            other.kill()
    return copy
