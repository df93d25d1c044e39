"""Real etcd servers, and what else may stand behind an endpoint."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdCluster, EtcdServer
from elastic3d.clock import SYSTEM
from elastic3d.doctor import etcd
from elastic3d.doctor.etcd import EtcdPlace, MemberFacts
from elastic3d.doctor.findings import FindingStatus, worst
from elastic3d.doctor.running import CheckRun, Stopped
from elastic3d.errors import EtcdError
from elastic3d.etcd import OutcomeUnknown, Tls, parse_endpoints
from elastic3d.etcd import diagnosis as etcd_diagnosis
from elastic3d.etcd_server.certificates import Certificates
from tests.doctor.looks import under_way

pytestmark = pytest.mark.etcd

OK, WARNING, FAILURE = FindingStatus


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not answer is not waited for long."""
    monkeypatch.setattr(etcd, "BUDGET", 1.0)
    monkeypatch.setattr(etcd, "TIMEOUT", 0.4)


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="module")
def closed() -> Iterator[EtcdCluster]:
    """One that is encrypted, and asks who we are."""
    with EtcdCluster(1, tls=True, password="right") as cluster:
        yield cluster


def at(endpoints: str, tls: Tls | None = None, user: str = "", password: str | None = None) -> EtcdPlace:
    return EtcdPlace(endpoints=parse_endpoints(endpoints, tls=tls is not None), user=user, password=password, tls=tls)


def member(place: EtcdPlace) -> MemberFacts:
    return etcd.measure_member(place, place.endpoints[0], under_way())


def test_a_server_that_is_well(server: EtcdServer) -> None:
    """Its version, its clock and a write, of which nothing stays."""
    place = at(server.endpoint)
    facts = member(place)
    assert facts.status is not None
    assert facts.status.leads
    assert worst(etcd.judge_member(facts, SYSTEM.wall())) in (OK, WARNING)  # slow, perhaps, on a busy machine
    reading = etcd.measure_clock(place, place.endpoints[0])
    assert reading is not None
    assert abs(reading.offset) <= reading.within
    run = under_way()
    write = etcd.measure_write(place, run)
    assert (write.error, write.removed, run.made) == ("", True, ())
    with server.client() as client:
        assert client.range("")[0] == ()
        assert client.leases() == ()


def test_who_gives_up_leaves_no_key_and_no_lease(server: EtcdServer) -> None:
    """In the middle of the writes."""

    class Impatient(CheckRun):
        def go_on(self, doing: str = "") -> None:
            if self.made:
                self.stop()
            super().go_on(doing)

    own = under_way()
    with pytest.raises(Stopped):
        etcd.measure_write(at(server.endpoint), Impatient(own.check, own.limit, own._clock))
    with server.client() as client:
        assert client.range("")[0] == ()
        assert client.leases() == ()


@pytest.mark.long
def test_credentials_and_encryption(closed: EtcdCluster, certificates: Certificates) -> None:
    """Right ones are let in; each kind of wrong one has its own remedy."""
    files = closed.certificates
    assert files is not None
    endpoint = closed.endpoint
    right = at(endpoint, Tls(ca=files.ca), "root", "right")
    facts = member(right)
    assert facts.status is not None
    assert facts.certificate_ends is not None
    assert 0 < facts.certificate_ends - SYSTEM.wall() <= 86400 + 60
    assert etcd.measure_write(right, under_way()).error == ""
    assert etcd.measure_clock(right, right.endpoints[0]) is not None

    wrong = member(at(endpoint, Tls(ca=files.ca), "root", "wrong"))
    assert (wrong.error, wrong.remedy) == ("wrong user name or password", "correct --user and --password-file")
    nobody = member(at(endpoint, Tls(ca=files.ca)))
    assert nobody.remedy == "give --user and --password-file, or --cert and --key"
    plain = member(at(endpoint))
    assert (plain.error, "--ca" in plain.remedy) == ("speaks TLS", True)
    stranger = member(at(endpoint, Tls(ca=certificates.ca), "root", "right"))
    assert "TLS handshake fails" in stranger.error


@pytest.mark.usefixtures("soon")
def test_a_server_without_tls_is_told_from_one_with_it(server: EtcdServer, certificates: Certificates) -> None:
    """Neither is simply away."""
    facts = member(at(server.endpoint, Tls(ca=certificates.ca)))
    assert (facts.error, facts.remedy[:14]) == ("does not speak TLS", "write http:// ")


def test_who_may_not_write_is_told(closed: EtcdCluster) -> None:
    """With what to grant."""
    for path, body in (
        ("/v3/auth/user/add", {"name": "guest", "password": "guest"}),
        ("/v3/auth/role/add", {"name": "reads"}),
        (
            "/v3/auth/role/grant",
            {"name": "reads", "perm": {"permType": "READ", "key": "L2VsYXN0aWMzZC8=", "range_end": "L2VsYXN0aWMzZDA="}},
        ),
        ("/v3/auth/user/grant", {"user": "guest", "role": "reads"}),
    ):
        closed.ask(path, body)
    assert closed.certificates is not None
    place = at(closed.endpoint, Tls(ca=closed.certificates.ca), "guest", "guest")
    facts = member(place)
    assert facts.error == ""
    write = etcd.measure_write(place, under_way())
    assert "permission denied" in write.error
    assert "grant" in write.remedy
    assert etcd.judge_write(write, place.prefix).status is FAILURE


def test_a_full_database_is_told() -> None:
    """By the member's alarm, and by the write."""
    with EtcdCluster(1, quota=4 << 20) as cluster, cluster.client() as client:
        place = at(cluster.endpoint)
        written = itertools.count()

        def alarmed() -> bool:
            # A member looks at the size of what it has committed, a tenth of a second later. What got no answer, or
            # no, is as good: only the alarm matters.
            with contextlib.suppress(EtcdError, OutcomeUnknown):
                client.put(f"/other/{next(written)}", b"x" * (64 << 10))
            return any("NOSPACE" in one.seen for one in etcd.judge_member(member(place), SYSTEM.wall()))

        assert wait_until(alarmed, 60.0, interval=0.0)
        assert "full" in etcd.measure_write(place, under_way()).error


@pytest.mark.usefixtures("soon")
def test_nobody_there_or_somebody_else(refusing_port: Callable[[], int]) -> None:
    """Each is told for what it is, in bounded time: nobody, a name of nobody, who never answers, who drips."""
    assert member(at(f"127.0.0.1:{refusing_port()}")).error == "the host answers, and nobody listens there"
    assert member(at("no-such-host.invalid")).error.startswith("cannot be reached: ")
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def drip() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])

        def drops() -> None:
            while not done.wait(0.1):
                for connection in list(kept):
                    with contextlib.suppress(OSError):
                        connection.sendall(b"H")

        threads = [threading.Thread(target=work, daemon=True) for work in (drip, drops)]
        for thread in threads:
            thread.start()
        begun = SYSTEM.monotonic()
        facts = member(at(f"127.0.0.1:{server.getsockname()[1]}"))
        assert facts.error == "takes connections, and answers nothing that etcd would"
        assert SYSTEM.monotonic() - begun < 60
        done.set()
        server.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30)
        for connection in kept:
            connection.close()


@pytest.mark.long
def test_a_member_that_stands_still_holds_up_nobody() -> None:
    """The others are well, and the write goes through them."""
    with EtcdCluster(3) as cluster:
        still = next(one for one in cluster.members if one is not cluster.leader())
        still.pause()
        try:
            place = at(cluster.endpoint)
            facts = [etcd.measure_member(place, endpoint, under_way()) for endpoint in place.endpoints]
            assert [bool(one.error) for one in facts] == [one is still for one in cluster.members]
            assert [one.status for one in etcd.judge_cluster(facts)] == [WARNING]
            assert etcd.measure_write(place, under_way()).error == ""
        finally:
            still.resume()


@pytest.mark.usefixtures("soon")
def test_a_member_that_has_lost_the_others_says_that_it_has_no_leader() -> None:
    """It is there, and neither its name nor a firewall is to be looked at."""
    with EtcdCluster(3) as cluster:
        last, *others = cluster.members
        for one in others:
            one.kill()
        place = at(last.endpoint)

        def alone() -> bool:
            with place.client(place.endpoints) as client:
                return not client.member_status().has_leader

        assert wait_until(alone, 60.0)
        (finding,) = etcd.judge_member(member(place), SYSTEM.wall())
        assert finding.status is FAILURE
        assert finding.seen.endswith("it has no leader, and serves no reads or writes")
        assert "most members" in finding.remedy


def test_an_answer_that_drips_is_not_waited_for() -> None:
    """The question why an endpoint does not answer has its own time, for the whole answer."""
    done = threading.Event()
    all_said = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for _ in range(600):
                    if done.wait(0.05):
                        return
                    connection.sendall(b"H")
                all_said.set()

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        (endpoint,) = parse_endpoints(f"127.0.0.1:{server.getsockname()[1]}")
        answer = etcd_diagnosis._ask(endpoint, 0.3)
        done.set()
        thread.join(30)
    assert set(answer) <= {ord("H")}
    assert not all_said.is_set()


def test_the_prefix_is_the_jobs(server: EtcdServer) -> None:
    """What is written lies below it, where a role may write."""
    place = replace(at(server.endpoint), prefix="/team/a")
    seen: list[str] = []

    class Watching(CheckRun):
        def making(self, what: str) -> None:
            seen.append(what)
            super().making(what)

    own = under_way()
    assert etcd.measure_write(place, Watching(own.check, own.limit, own._clock)).error == ""
    assert seen[0].startswith("key /team/a/doctor-")
