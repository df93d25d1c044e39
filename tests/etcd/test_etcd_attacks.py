"""Attacks by operators, neighbours and time on a cluster of three with TLS and passwords: reported and survived."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.servers import etcd_attacks
from chaos.servers.etcd import EtcdCluster, EtcdMember
from elastic3d.errors import ConfigurationError, EtcdRefused, EtcdUnavailable
from elastic3d.etcd import (
    Changes,
    Compare,
    Connected,
    Delete,
    Delivery,
    Disconnected,
    Ended,
    Impaired,
    LeaseKeeper,
    LeaseLoss,
    Put,
    Tls,
    Watch,
)
from elastic3d.etcd_server.certificates import Certificates
from tests.etcd.etcd_helpers import wait_until

pytestmark = [pytest.mark.etcd, pytest.mark.long]


@pytest.fixture
def cluster(one_binary: Path) -> Iterator[EtcdCluster]:
    """Three members with TLS and a password."""
    with EtcdCluster(3, binary=one_binary, password="old", tls=True) as cluster:
        yield cluster


def test_a_full_database_refuses_writes_and_keeps_leases(binary: Path) -> None:
    """Over its quota etcd refuses at once all that could grow it, leases too; existing leases are kept.

    Keepalives, watches, reads and deletes go on, so nobody is lost by it; with space made, so do writes. (A transaction
    that only deletes is refused by members whose own file is over the quota, and by no others.)
    """
    with EtcdCluster(3, binary=binary, password="old", tls=True, quota=4 << 20) as cluster, cluster.client() as client:
        keeper, lost = LeaseKeeper(client), list[LeaseLoss]()
        lease = keeper.grant(2, lambda _, loss: lost.append(loss))
        client.put("k", b"1", lease.id)
        deliveries: list[Delivery] = []
        watch = Watch(client, "k", deliveries.append)
        etcd_attacks.fill(cluster)
        began = time.monotonic()
        writes: list[Callable[[], object]] = [
            lambda: client.put("k", b"2"),
            lambda: client.grant(5),
            lambda: client.txn([], [Delete("other"), Put("k", b"2")]),
            lambda: client.txn([Compare.absent("k")], [Put("k", b"2")]),
        ]
        for write in writes:
            with pytest.raises(Impaired, match=r"NOSPACE.*disarm"):
                write()
        assert time.monotonic() - began < 2.0
        time.sleep(lease.ttl + 1)
        assert lease.held(time.monotonic())
        client.delete("k")
        wait_until(lambda: any(isinstance(news, Changes) for news in deliveries))
        etcd_attacks.make_space(cluster)
        client.put("k", b"3", lease.id)
        client.grant(5)
        assert not lost
        assert not [news for news in deliveries if isinstance(news, Disconnected)]
        watch.close()
        keeper.close()


def test_a_leader_that_hands_over_costs_nothing(cluster: EtcdCluster) -> None:
    """Leases live on, and watches miss nothing."""
    with cluster.client() as client:
        keeper, lost = LeaseKeeper(client), list[LeaseLoss]()
        lease = keeper.grant(2, lambda _, loss: lost.append(loss))
        deliveries: list[Delivery] = []
        watch = Watch(client, "k", deliveries.append)
        wait_until(lambda: any(isinstance(news, Connected) for news in deliveries))
        before = cluster.leader()
        assert etcd_attacks.move_leader(cluster)
        wait_until(lambda: cluster.leader() is not before)
        client.put("k", b"1", lease.id)
        wait_until(lambda: any(isinstance(news, Changes) for news in deliveries))
        time.sleep(lease.ttl + 1)
        assert lease.held(time.monotonic())
        assert not lost
        watch.close()
        keeper.close()


def test_a_changed_password_is_read_again(cluster: EtcdCluster, tmp_path: Path) -> None:
    """If the file is replaced together with the password nobody notices; streams and leases live on."""
    file = tmp_path / "password"
    file.write_text("old")
    with cluster.client(password=file.read_text) as client:
        client.put("k", b"1")
        for number in range(5):
            etcd_attacks.change_password(cluster, f"new{number}")
            file.write_text(f"new{number}")
            client.put("k", b"2")
            client.grant(5)


def test_a_password_file_that_is_late_costs_nothing(cluster: EtcdCluster, tmp_path: Path) -> None:
    """Leases are kept and watches flow; calls say what is wrong.

    A stream that must be opened anew waits for the right password, and then misses nothing.
    """
    file = tmp_path / "password"
    file.write_text("old")
    with cluster.client(password=file.read_text) as client:
        keeper, lost = LeaseKeeper(client), list[LeaseLoss]()
        lease = keeper.grant(2, lambda _, loss: lost.append(loss))
        deliveries: list[Delivery] = []
        watch = Watch(client, "k", deliveries.append)
        wait_until(lambda: any(isinstance(news, Connected) for news in deliveries))
        etcd_attacks.change_password(cluster, "new")
        before = sum(map(_authentications, cluster.members))
        began = time.monotonic()
        while time.monotonic() < began + lease.ttl + 1:
            with pytest.raises(Impaired, match="password was changed"):
                client.put("k", b"1")
            time.sleep(0.02)  # or this process is too busy to read its own watch
        # A refusal costs etcd a tenth of a second of work: not every call may cause one.
        assert sum(map(_authentications, cluster.members)) - before <= 3
        assert lease.held(time.monotonic())
        with cluster.client() as other:
            other.put("k", b"2")
            wait_until(lambda: any(isinstance(news, Changes) for news in deliveries))
            for member in cluster.members:
                member.kill()
                member.start()
            wait_until(lambda: any(isinstance(news, Disconnected) for news in deliveries))
            cluster.wait_healthy()
            wait_until(lambda: lost)
            other.put("k", b"3")
        lost_at = len(deliveries)
        assert not any(isinstance(news, Ended) for news in deliveries)
        file.write_text("new")
        wait_until(lambda: any(isinstance(news, Changes) for news in deliveries[lost_at:]))
        changes = next(news for news in deliveries[lost_at:] if isinstance(news, Changes))
        assert [change.kv.value for change in changes.changes if change.kv is not None] == [b"3"]
        client.put("k", b"4", keeper.grant(2).id)
        watch.close()
        keeper.close()


def _authentications(member: EtcdMember) -> int:
    """Return how many passwords this member was asked to check."""
    with urllib.request.urlopen(urllib.request.Request(f"{member.endpoint}/metrics"), context=member.context) as answer:
        said = answer.read().decode()
    counts = re.findall(r'grpc_server_started_total\{grpc_method="Authenticate".*\} (\d+)', said)
    return sum(map(int, counts))


def test_a_password_that_was_never_right_is_refused_at_once(cluster: EtcdCluster) -> None:
    """Nobody has to wait because of a typing error."""
    with cluster.client(password="wrong") as client:
        with pytest.raises(EtcdRefused, match="wrong user name or password"):
            client.check()


@pytest.fixture
def certified(one_binary: Path) -> Iterator[EtcdCluster]:
    """Three members that require client certificates; the name in ours is root, so no password is needed."""
    with EtcdCluster(3, binary=one_binary, password="old", tls=True, client_certificates=True) as cluster:
        yield cluster


def test_an_expired_client_certificate_is_reported_and_replaced(certified: EtcdCluster) -> None:
    """Open connections go on; new ones fail with its date; the same client goes on with the replaced file."""
    assert certified.certificates is not None
    with certified.client(user=None, password=None) as client:
        client.put("k", b"1")
        certified.certificates.expire("client")
        client.put("k", b"2")
        deliveries: list[Delivery] = []
        watch = Watch(client, "k", deliveries.append)
        wait_until(lambda: any(isinstance(news, Disconnected) for news in deliveries))
        assert re.search(r"client\.pem expired on .*replace the file", str(deliveries[-1]))
        with certified.client(budget=1.5) as fresh, pytest.raises(EtcdRefused, match=r"client\.pem expired on"):
            fresh.check()
        for member in certified.members:
            member.kill()
            member.start()
        with pytest.raises(EtcdUnavailable, match=r"client\.pem expired on"):
            client.put("k", b"3", idempotent=True)
        certified.certificates.renew("client")
        client.put("k", b"4", idempotent=True)
        wait_until(lambda: any(isinstance(news, Connected) for news in deliveries))
        watch.close()


def test_an_expired_server_certificate_is_reported_and_replaced(certified: EtcdCluster) -> None:
    """The same from the other side: etcd reads its own files for each connection."""
    assert certified.certificates is not None
    with certified.client() as client:
        client.put("k", b"1")
        certified.certificates.expire("server")
        client.put("k", b"2")
        with certified.client(budget=1.5) as fresh:
            with pytest.raises(EtcdUnavailable, match="not accepted: certificate has expired"):
                fresh.put("k", b"3", idempotent=True)
            certified.certificates.renew("server")
            fresh.put("k", b"3", idempotent=True, budget=5.0)


HALF_WRITTEN = """
import sys
from pathlib import Path
from elastic3d.errors import EtcdUnavailable
from elastic3d.etcd import EtcdClient, Tls
certificate, key, ca = map(Path, sys.argv[2:])
with EtcdClient(sys.argv[1], tls=Tls(ca=ca, certificate=certificate, key=key), budget=1.0) as client:
    for path in (certificate, key, ca):
        content = path.read_bytes()
        for part in (b"", content[: len(content) // 2]):
            path.write_bytes(part)
            try:
                client.get("k")
                print("an answer")
            except EtcdUnavailable as error:
                print(error)
        path.write_bytes(content)
"""


def test_files_that_are_being_replaced_are_waited_for(one_binary: Path, tmp_path: Path) -> None:
    """An empty or half-written file is named and waited for; gRPC would abort the process over some."""
    made = Certificates.make(tmp_path)
    files = [str(path) for path in (made.client, made.client_key, made.ca)]
    command = [sys.executable, "-c", HALF_WRITTEN, "https://127.0.0.1:9", *files]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert len(said) == 6
    names = ("client.pem", "client.pem", "client.key", "client.key", "ca.pem", "ca.pem")
    assert [name for name, line in zip(names, said, strict=True) if name in line] == list(names)


def test_files_that_are_wrong_from_the_start_are_refused(tmp_path: Path) -> None:
    """Before anything is tried: a file that is no PEM, or a key of another certificate."""
    made = Certificates.make(tmp_path)
    with pytest.raises(ConfigurationError, match="cannot be used together"):
        Tls(ca=made.ca, certificate=made.client, key=made.server_key)
    made.ca.write_text("-----BEGIN")
    with pytest.raises(ConfigurationError, match=r"ca\.pem is not a PEM file"):
        Tls(ca=made.ca)


def test_an_unreadable_password_file_counts_as_an_outage(cluster: EtcdCluster) -> None:
    """The reason is reported, and the client lives on."""
    passwords: list[str] = ["old"]

    def password() -> str:
        if not passwords:
            raise ConfigurationError("the password file is gone")
        return passwords[0]

    with cluster.client(password=password, budget=1.0) as client:
        client.put("k", b"1")
        passwords.clear()
        etcd_attacks.change_password(cluster, "new")
        with pytest.raises(EtcdUnavailable, match="password file is gone"):
            client.put("k", b"2")
        passwords.append("new")
        client.put("k", b"2")
