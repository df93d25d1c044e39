"""Calls to healthy servers, and to endpoints that are not the intended etcd."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d.errors import ConfigurationError, EtcdRefused, EtcdUnavailable, UsageError
from elastic3d.etcd import (
    Changes,
    Compacted,
    Compare,
    Connected,
    Delete,
    Delivery,
    EtcdClient,
    Get,
    LeaseGone,
    LeaseKeeper,
    Put,
    Watch,
)
from elastic3d.etcd_server.binary import etcd_version, find_etcd
from tests.etcd.etcd_helpers import wait_until

pytestmark = pytest.mark.etcd


def test_check_returns_the_servers_version(client: EtcdClient, binary: Path) -> None:
    """The server reports the same version over gRPC as its binary does."""
    assert client.check() == ".".join(map(str, etcd_version(binary)))


def test_keys_are_written_read_and_deleted(client: EtcdClient) -> None:
    """A key reads back as it was written, with its revisions; once deleted it is None."""
    assert client.get("k") is None
    first = client.put("k", b"1")
    second = client.put("k", b"2")
    item = client.get("k")
    assert item is not None
    assert (item.key, item.value, item.version) == ("k", b"2", 2)
    assert (item.create_revision, item.mod_revision) == (first, second)
    assert client.delete("k") == 1
    assert client.delete("k") == 0
    assert client.get("k") is None


def test_the_next_key_is_read_without_listing_all(client: EtcdClient) -> None:
    """The first key in an interval, so that a tree of keys can be walked branch by branch."""
    for key in ("a/1/x", "a/1/y", "a/2/x", "b"):
        client.put(key, b"")
    assert client.next_key("a/", "a0") == "a/1/x"
    assert client.next_key("a/10", "a0") == "a/2/x"
    assert client.next_key("a/20", "a0") is None


def test_ranges_list_a_prefix_at_a_revision(client: EtcdClient, server: EtcdServer) -> None:
    """In key order, as of now or of a revision, and with no key of another namespace."""
    with EtcdClient(server.endpoints, namespace="/elsewhere/") as other:
        other.put("a", b"theirs")
    then = client.put("a/1", b"old")
    client.put("a/2", b"")
    client.put("b", b"")
    client.put("a/1", b"new")
    now, revision = client.range("a/")
    assert [(kv.key, kv.value) for kv in now] == [("a/1", b"new"), ("a/2", b"")]
    assert revision >= then + 3
    past, _ = client.range("", revision=then)
    assert [(kv.key, kv.value) for kv in past] == [("a/1", b"old")]
    assert len(client.range("")[0]) == 3
    assert client.delete("a", prefix=True) == 2
    client.compact(then + 1)
    with pytest.raises(Compacted):
        client.range("", revision=then)


def test_what_was_compacted_already_is_compacted(client: EtcdClient) -> None:
    """The answer to a first request may be lost, or somebody else faster."""
    revision = client.put("k", b"")
    client.put("k", b"")
    for requested in (revision + 1, revision + 1, revision):
        client.compact(requested)
    with pytest.raises(Compacted):
        client.range("", revision=revision)


def test_transactions_run_one_branch(client: EtcdClient) -> None:
    """Conditions on absence, version, revisions and value choose the branch; gets come back in order."""
    result = client.txn([Compare.absent("k")], [Put("k", b"1"), Put("l", b"2")], [Get("k")])
    assert result.succeeded
    assert result.gets == ()
    created = result.revision
    again = client.txn([Compare.absent("k")], [Put("k", b"x")], [Get("k"), Get("none"), Get("", prefix=True)])
    assert not again.succeeded
    assert [[kv.value for kv in kvs] for kvs in again.gets] == [[b"1"], [], [b"1", b"2"]]
    held = [
        Compare.version("k", 1),
        Compare.create_revision("k", created),
        Compare.mod_revision("k", created),
        Compare.value("k", b"1"),
        Compare.version("none", 0),
    ]
    assert client.txn(held, [Delete("", prefix=True)]).succeeded
    assert client.range("")[0] == ()
    assert not client.txn([Compare.value("k", b"1")], [Put("k", b"")]).succeeded


def test_concurrent_swaps_lose_no_increment(client: EtcdClient) -> None:
    """Eight threads that each swap a counter up 25 times end at exactly 200."""
    client.put("counter", b"0")

    def increment() -> None:
        for _ in range(25):
            while True:
                now = client.get("counter")
                assert now is not None
                swap = Put("counter", b"%d" % (int(now.value) + 1))
                if client.txn([Compare.mod_revision("counter", now.mod_revision)], [swap]).succeeded:
                    break

    threads = [threading.Thread(target=increment) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = client.get("counter")
    assert final is not None
    assert (final.value, final.version) == (b"200", 201)


def test_a_put_under_a_dead_lease_fails(client: EtcdClient) -> None:
    """The write does not happen, which fences whoever lost its lease for free."""
    lease, ttl = client.grant(60)
    assert ttl == 60.0
    client.put("k", b"mine", lease)
    assert lease in client.leases()
    left = client.time_to_live(lease)
    assert left is not None
    assert left >= 55
    assert client.granted(lease) == 60.0
    client.revoke(lease)
    client.revoke(lease)
    assert client.get("k") is None
    assert client.time_to_live(lease) is client.granted(lease) is None
    with pytest.raises(LeaseGone):
        client.put("k", b"late", lease)
    with pytest.raises(LeaseGone):
        client.txn([], [Put("k", b"late", lease)])
    assert client.get("k") is None


def test_invalid_requests_are_not_retried(client: EtcdClient) -> None:
    """etcd would never accept them."""
    began = time.monotonic()
    with pytest.raises(EtcdRefused, match="too many operations"):
        client.txn([], [Put(str(number), b"") for number in range(200)])
    with pytest.raises(EtcdRefused, match="duplicate key"):
        client.txn([], [Put("k", b"1"), Put("k", b"2")])
    assert time.monotonic() - began < 1.0


def test_a_large_listing_arrives(client: EtcdClient) -> None:
    """Listings are not limited by gRPC's 4 MB."""
    for number in range(6):
        client.put(f"k{number}", b"x" * 1_000_000)
    assert sum(len(kv.value) for kv in client.range("")[0]) == 6_000_000
    client.delete("", prefix=True)


def test_a_forked_child_uses_connections_of_its_own(client: EtcdClient) -> None:
    """Closing the client in the child leaves the parent's connections open."""
    client.put("k", b"1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            item = client.get("k")
            client.close()
            code = 0 if item is not None and item.value == b"1" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get("k") is not None


def test_close_leaves_nothing_behind(server: EtcdServer) -> None:
    """It ends watches, lease keepers, every thread and every connection, in little time."""
    before = {thread.ident for thread in threading.enumerate()}
    with EtcdClient(server.endpoints) as client:
        seen = threading.Event()
        watch = Watch(client, "/close/", lambda delivery: seen.set())
        keeper = LeaseKeeper(client)
        keeper.grant(5)
        assert seen.wait(5)
        assert _connections(server.members[0].port)
        began = time.monotonic()
    assert time.monotonic() - began < 2.0
    watch.close()
    keeper.close()
    wait_until(lambda: not {t.ident for t in threading.enumerate()} - before)
    wait_until(lambda: not _connections(server.members[0].port))
    with pytest.raises(UsageError):
        keeper.grant(5)
    with pytest.raises(UsageError):
        Watch(client, "", lambda delivery: None)


def _connections(port: int) -> int:
    """Return how many connections of this process lead to `port`."""
    peer = f"0100007F:{port:04X}"  # also the end of the IPv6 form, which gRPC uses
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    return sum(1 for line in lines if line[2].endswith(peer) and f"socket:[{line[9]}]" in inodes)


def test_a_password_is_checked(binary: Path) -> None:
    """The right one is let in and gets new tokens; a wrong one, or none, is refused at once with a clear message."""
    with EtcdServer(binary=binary, password="right") as server:
        with EtcdClient(server.endpoints, user="root", password="right") as client:
            client.check()
            client.put("k", b"1")
            server.restart()  # simple tokens are forgotten with the process
            client.put("k", b"2")
            _outdate(client)
            item = client.get("k")
            assert item is not None
            assert item.value == b"2"
            deliveries: list[Delivery] = []
            watch = Watch(client, "k", deliveries.append)
            wait_until(lambda: any(isinstance(delivery, Connected) for delivery in deliveries))
            _outdate(client)
            server.restart()
            client.put("k", b"3")
            wait_until(lambda: any(isinstance(delivery, Changes) for delivery in deliveries))
            watch.close()
        for user, password, words in (
            ("root", "wrong", "wrong user"),
            ("eve", "x", "wrong user"),
            (None, None, "user"),
        ):
            with EtcdClient(server.endpoints, user=user, password=password) as client:
                began = time.monotonic()
                with pytest.raises(EtcdRefused, match=words):
                    client.check()
                with pytest.raises(EtcdRefused, match=words):
                    client.put("k", b"")
                ended: list[object] = []
                with pytest.raises(EtcdRefused, match=words):
                    LeaseKeeper(client).grant(5) if user else client.get("k")
                watch = Watch(client, "k", ended.append)
                wait_until(lambda: ended)  # noqa: B023  # used within the turn
                assert "Ended" in repr(ended[0])
                watch.close()
                assert time.monotonic() - began < 5


def _outdate(client: EtcdClient) -> None:
    assert client.session._login is not None
    client.session._login._token = "invalid.1"


def test_credentials_are_ignored_by_a_cluster_without_authentication(server: EtcdServer) -> None:
    """As with etcdctl, they do no harm."""
    with EtcdClient(server.endpoints, user="root", password="any") as client:
        client.check()


def test_authentication_may_be_enabled_later(binary: Path) -> None:
    """Whoever has credentials logs in then, be it for a call or a watch: what there was goes on, and more may begin."""
    with EtcdServer(binary=binary) as server:
        ask = server.members[0].ask
        ask("/v3/auth/user/add", {"name": "root", "password": "r"})
        ask("/v3/auth/role/add", {"name": "root"})
        ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        old, new = list[Delivery](), list[Delivery]()
        given = {"user": "root", "password": "r"}
        with server.client(**given) as client, server.client(**given) as watching:
            client.check()
            client.put("k", b"1")
            watches = [Watch(watching, "k", old.append)]
            wait_until(lambda: any(isinstance(delivery, Connected) for delivery in old))
            keeper = LeaseKeeper(client)
            lease = keeper.grant(2)
            ask("/v3/auth/enable", {})
            client.put("k", b"2", lease.id)
            item = client.get("k")
            assert item is not None
            assert item.value == b"2"
            server.restart()  # which ends the watch's stream
            client.put("k", b"3")
            watches.append(Watch(client, "k", new.append))
            wait_until(lambda: any(isinstance(delivery, Connected) for delivery in new))
            client.put("k", b"4")
            for deliveries in (old, new):
                wait_until(lambda: b"4" in _values(deliveries))  # noqa: B023  # used within the turn
            assert _values(old) == [b"2", b"3", b"4"]
            time.sleep(lease.ttl + 1)
            assert lease.held(time.monotonic())
            for watch in watches:
                watch.close()
            keeper.close()


def _values(deliveries: list[Delivery]) -> list[bytes]:
    changes = [change for delivery in deliveries if isinstance(delivery, Changes) for change in delivery.changes]
    return [change.kv.value for change in changes if change.kv is not None]


def test_permissions_are_those_of_the_role(one_binary: Path) -> None:
    """A user with rights on a prefix works there, and is refused clearly elsewhere."""
    with EtcdServer(binary=one_binary) as server:
        ask = server.members[0].ask
        ask("/v3/auth/user/add", {"name": "root", "password": "r"})
        ask("/v3/auth/role/add", {"name": "root"})
        ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        ask("/v3/auth/user/add", {"name": "job", "password": "j"})
        ask("/v3/auth/role/add", {"name": "job"})
        # Keys in JSON are base64: /job/ up to /job0.
        ask("/v3/auth/role/grant", {"name": "job", "perm": {"permType": 2, "key": "L2pvYi8=", "range_end": "L2pvYjA="}})
        ask("/v3/auth/user/grant", {"user": "job", "role": "job"})
        ask("/v3/auth/enable", {})
        with EtcdClient(server.endpoints, user="job", password="j", namespace="/job/") as client:
            client.check()
            client.put("k", b"")
        with EtcdClient(server.endpoints, user="job", password="j", namespace="/other/") as client:
            with pytest.raises(EtcdRefused, match="permission denied"):
                client.check()
            ended: list[object] = []
            watch = Watch(client, "", ended.append)
            wait_until(lambda: ended)
            assert "permission denied" in repr(ended[0])
            watch.close()


def test_tls_mistakes_are_refused_and_named(binary: Path, tmp_path: Path) -> None:
    """With the right authority the connection is encrypted."""
    with EtcdServer(binary=binary, tls=True) as server:
        assert server.certificates is not None
        files = server.certificates.tls(client=False)
        with EtcdClient(server.endpoint, tls=files) as client:
            client.check()
            client.put("k", b"1")
        with EtcdClient(server.endpoint) as client, pytest.raises(EtcdRefused, match="speaks TLS; write https"):
            client.check(budget=1.0)
        with EtcdClient(server.endpoints) as client, pytest.raises(EtcdRefused, match="handshake"):
            client.check(budget=1.0)  # the system's authorities did not sign it
    with EtcdServer(binary=binary) as server:
        with EtcdClient(f"https://{server.endpoint}") as client, pytest.raises(EtcdRefused, match="does not speak TLS"):
            client.check(budget=1.0)


def test_a_client_certificate_names_the_user(one_binary: Path) -> None:
    """With `--client-cert-auth` its common name is the user: without one the server refuses."""
    with EtcdServer(binary=one_binary, tls=True, client_certificates=True, password="secret") as server:
        assert server.certificates is not None
        with EtcdClient(server.endpoints, tls=server.certificates.tls()) as client:
            client.check()
            client.put("k", b"1")
        with EtcdClient(server.endpoints, tls=server.certificates.tls(client=False)) as client:
            with pytest.raises(EtcdRefused, match="client certificate"):
                client.check(budget=1.0)


def test_a_closed_port_is_reported_within_the_budget() -> None:
    """As EtcdUnavailable; the message names the endpoint and what to check."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with EtcdClient(f"127.0.0.1:{port}", budget=1.0) as client:
            began = time.monotonic()
            with pytest.raises(EtcdUnavailable, match=f"127.0.0.1:{port}.*see that etcd runs"):
                client.check()
            with pytest.raises(EtcdUnavailable):
                client.put("k", b"")
            assert time.monotonic() - began < 3.0


def test_a_silent_endpoint_costs_one_deadline_per_try() -> None:
    """It accepts and says nothing; the budget bounds all tries."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with EtcdClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout=0.3, budget=1.0) as client:
            began = time.monotonic()
            with pytest.raises(EtcdUnavailable):
                client.check()
            assert time.monotonic() - began < 2.5


@contextmanager
def _web_server(body: bytes) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("body", "words"),
    [(b"<html>hello</html>", "is a web server, not etcd"), (b'{"etcdserver":"2.3.7"}', r"2\.3\.7; 3\.4 or later")],
)
def test_a_web_server_or_an_old_etcd_is_named(body: bytes, words: str) -> None:
    """gRPC would only say UNAVAILABLE, so the check asks over HTTP what it is."""
    with _web_server(body) as port, EtcdClient(f"127.0.0.1:{port}", budget=1.0) as client:
        with pytest.raises(EtcdRefused, match=words):
            client.check()


def test_find_etcd_checks_an_explicit_path() -> None:
    """A wrong path is an error of its own; without a path an etcd is found here, or the error helps."""
    with pytest.raises(ConfigurationError, match="not an executable"):
        find_etcd("/nonexistent/etcd")
    assert re.search("etcd", str(find_etcd()))
