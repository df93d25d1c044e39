"""etcd fails, as a whole or in part, under a job: the job survives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.servers import etcd_attacks
from chaos.servers.etcd import EtcdCluster, EtcdMember
from elastic3d.membership import events as e
from tests.membership.crew import POLICY, Crew, Hand, in_training, wait

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(240), pytest.mark.long]

PATIENCE = POLICY.lease + POLICY.grace
"""Seconds after which a lost member is certainly evicted."""


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Three members of etcd with TLS and a password, with a quota small enough to be filled."""
    with EtcdCluster(3, password="old", tls=True, quota=4 << 20) as cluster:
        yield cluster


@pytest.fixture
def crew(cluster: EtcdCluster) -> Iterator[Crew]:
    """Three members that train."""
    with in_training(cluster.client) as crew:
        yield crew


def still_whole(crew: Crew) -> None:
    """Assert that the job is unchanged, and reacts to the next fault."""
    crew.all_registered("abc", 10)
    crew.goes_on("abc", 1, PATIENCE + 0.5)
    assert crew.registered() == "abc*"
    crew.all.pop("a").die()
    crew.trains("bc", 2, 5)


def test_a_job_survives_the_death_of_etcds_leader(cluster: EtcdCluster, crew: Crew) -> None:
    """The other two elect another, and the job does not notice; nor does it when the third comes back."""
    victim = cluster.leader()
    victim.kill()
    crew.goes_on("abc", 1, PATIENCE)
    victim.start()
    cluster.wait_healthy()
    still_whole(crew)


@pytest.mark.parametrize("seconds", [8.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_job_survives_the_loss_of_etcds_quorum(cluster: EtcdCluster, crew: Crew, seconds: float) -> None:
    """For longer than every lease and grace: training goes on, and all register again when it is back."""
    victims = cluster.members[:2]
    for victim in victims:
        victim.kill()
    # The remaining member still believes in its leader for a while, and may then be electing one.
    wait(lambda: not any(one.there for one in crew.all.values()), 10)
    crew.goes_on("abc", 1, seconds)
    for victim in victims:
        victim.start()
    wait(lambda: all(one.there for one in crew.all.values()), 15)
    still_whole(crew)


@pytest.mark.parametrize("which", ["leader", "follower"])
def test_a_job_survives_a_stopped_etcd_member(cluster: EtcdCluster, crew: Crew, which: str) -> None:
    """It accepts connections and stays silent; the job moves to the others in time, and nothing changes."""
    leader = cluster.leader()
    followers = [member for member in cluster.members if member is not leader]
    victim: EtcdMember = leader if which == "leader" else _used(followers, crew)
    victim.pause()
    try:
        crew.goes_on("abc", 1, 8.0)
    finally:
        victim.resume()
    still_whole(crew)


def _used(members: list[EtcdMember], crew: Crew) -> EtcdMember:
    """Return the one of these that the job's own clients would try first."""
    session = crew.all["a"].client.session
    ports = [session.endpoints[index].port for index in session.order()]
    return min(members, key=lambda member: ports.index(member.port))


def test_a_job_survives_a_full_etcd_database(cluster: EtcdCluster, crew: Crew) -> None:
    """NOSPACE counts as etcd being away for writes: leases are kept, nobody ends, people are told what to do.

    A lease lost meanwhile cannot be granted again, but its node is heard: nobody is evicted.
    """
    etcd_attacks.fill(cluster)
    crew.goes_on("abc", 1, PATIENCE + 1)
    assert crew.registered() == "abc*"
    etcd_attacks.revoke(crew.client, f"{crew.root}roll/members/{crew.all['b'].id}")
    crew.goes_on("abc", 1, PATIENCE + 1)
    assert crew.registered() == "ac*"
    reasons = crew.all["b"].troubles()
    assert len(reasons) == 1
    assert "etcdctl compact, defrag, alarm disarm" in reasons[0]
    etcd_attacks.make_space(cluster)
    still_whole(crew)
    assert crew.all["b"].troubles()[-1] == ""


def test_a_death_during_a_full_database_is_handled_afterwards(cluster: EtcdCluster, crew: Crew) -> None:
    """No generation can be sealed, so training stops; it goes on without the dead node as soon as there is space."""
    etcd_attacks.fill(cluster)
    crew.all.pop("c").die()
    wait(lambda: not crew.worlds(), 5)
    time.sleep(PATIENCE)
    assert all(one.exit is None for one in crew.all.values())
    etcd_attacks.make_space(cluster)
    crew.trains("ab", 2, 10)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """The password file."""
    file = tmp_path / "password"
    file.write_text("old")
    return file


@pytest.fixture
def reading(cluster: EtcdCluster, secret: Path) -> Iterator[Crew]:
    """Three training members that read their password from a file."""
    with in_training(cluster.client, how=lambda: cluster.client(password=secret.read_text)) as crew:
        yield crew


def restart(cluster: EtcdCluster) -> None:
    """Kill and start every member, so that all connections must be made anew."""
    for member in cluster.members:
        member.kill()
        member.start()
    cluster.wait_healthy()


def test_a_job_survives_a_changed_password(cluster: EtcdCluster, reading: Crew, secret: Path) -> None:
    """While only the file is late, streams and leases live on: nothing is lost, and people are told."""
    etcd_attacks.change_password(cluster, "new")
    reading.client.close()
    reading.client = cluster.client()
    reading.goes_on("abc", 1, PATIENCE + 4)
    assert reading.registered() == "abc*"
    reasons = [reason for one in reading.all.values() for reason in one.troubles()]
    assert reasons
    assert "password file" in reasons[0]
    secret.write_text("new")
    still_whole(reading)


def test_a_job_survives_a_changed_password_with_broken_connections(
    cluster: EtcdCluster, reading: Crew, secret: Path
) -> None:
    """Everybody is locked out: etcd is away for all, training goes on; missed changes are listed again.

    History is compacted meanwhile, so the watches cannot resume where they were.
    """
    etcd_attacks.change_password(cluster, "new")
    reading.client.close()
    reading.client = cluster.client()
    restart(cluster)
    wait(lambda: not any(one.there for one in reading.all.values()), 10)
    reading.client.put(f"{reading.root}board/tombs/nobody@1", b"{}")
    reading.client.delete(f"{reading.root}board/tombs/nobody@1")
    etcd_attacks.compact(cluster)
    reading.goes_on("abc", 1, PATIENCE + 2)
    # The first report may be that a restarting member refuses connections.
    wait(
        lambda: all("password file" in one.troubles()[-1] for one in reading.all.values()),
        20,
        lambda: str([one.troubles() for one in reading.all.values()]),
    )
    secret.write_text("new")
    wait(lambda: all(one.there for one in reading.all.values()), 40)
    wait(lambda: all(_gaps(one) == [False, True] for one in reading.all.values()), 5)
    still_whole(reading)


def _gaps(one: Hand) -> list[bool]:
    """Return for each listing of the board whether earlier changes are unknown."""
    return [event.gap for event in one.noted if isinstance(event, e.Listed) and event.tier is e.Tier.BOARD]


def test_a_member_locked_out_alone_stops_and_returns(cluster: EtcdCluster, tmp_path: Path) -> None:
    """It stops its trainers before it can be sealed out, the others go on, and it returns with the right password."""
    files = {name: tmp_path / name for name in "abc"}
    crew = Crew(cluster.client)
    try:
        for name, file in files.items():
            file.write_text("old")
            crew.start(name, connect=lambda file=file: cluster.client(password=file.read_text))  # type: ignore[misc]
        wait(lambda: len(crew.worlds()) == 1 and all(one.running for one in crew.all.values()), 10)
        ((_, names),) = crew.worlds()
        etcd_attacks.change_password(cluster, "new")
        for name in "ac":
            files[name].write_text("new")
        crew.client.close()
        crew.client = cluster.client()
        restart(cluster)
        wait(lambda: crew.all["b"].running is None, 20)
        assert crew.all["b"].exit is None
        left = names.replace("b", "")
        # It may have been sealed into one more generation before its lease ended.
        wait(lambda: {names for _, names in crew.worlds()} == {left}, 60, lambda: str(crew.worlds()))
        ((number, _),) = crew.worlds()
        files["b"].write_text("new")
        wait(lambda: crew.all["b"].exit is not None, 40)
        crew.all["b"].rejoin()
        crew.trains(f"{left}b", number + 1, 10)
    finally:
        crew.close()


@pytest.mark.parametrize("whose", ["client", "server"])
def test_a_job_survives_an_expired_certificate(whose: str) -> None:
    """No new connection works: training goes on, people are told which file, and a new one ends the outage.

    The name in the certificate is root, so no password is needed.
    """
    with EtcdCluster(3, password="old", tls=True, client_certificates=True) as cluster:
        assert cluster.certificates is not None
        crew = Crew(lambda: cluster.client(user=None, password=None))
        try:
            crew.start("a", "b", "c")
            crew.trains("abc", 1, 10)
            cluster.certificates.expire(whose)
            crew.goes_on("abc", 1, PATIENCE)
            assert all(one.there for one in crew.all.values())
            for member in cluster.members:
                member.kill()
                member.start()
            wait(lambda: not any(one.there for one in crew.all.values()), 10)
            crew.goes_on("abc", 1, PATIENCE + 1)
            # Until then each may have said that it was refused, by members that began just then.
            wait(lambda: all("expired" in one.troubles()[-1] for one in crew.all.values()), 20)
            cluster.certificates.renew(whose)
            wait(lambda: all(one.there for one in crew.all.values()), 20)
            still_whole(crew)
        finally:
            crew.close()
