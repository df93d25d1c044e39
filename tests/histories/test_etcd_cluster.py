"""A real job on an etcd of three with TLS and a password: parts of it fail, and no bit and no generation changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.etcd import EtcdCluster, EtcdMember
from chaos.play import play
from chaos.scenario import EtcdPause, EtcdRestart, Fault, When
from elastic3d.etcd import EtcdClient
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]


class Part:
    """A cluster of which `members` can be broken at once, beginning with the leader."""

    def __init__(self, cluster: EtcdCluster, members: int) -> None:
        self._cluster, self._members = cluster, members
        self._victims: list[EtcdMember] = []

    @property
    def endpoint(self) -> str:
        """All members' addresses."""
        return self._cluster.endpoint

    def client(self) -> EtcdClient:
        """Return a client that may see everything."""
        return self._cluster.client()

    def kill(self) -> None:
        """Kill the leader and as many others as requested."""
        for member in self._choose():
            member.kill()

    def restart(self) -> None:
        """Start them again."""
        for member in self._victims:
            member.start()

    def pause(self) -> None:
        """Stop the leader and as many others as requested."""
        for member in self._choose():
            member.pause()

    def resume(self) -> None:
        """Resume them."""
        for member in self._victims:
            member.resume()

    def _choose(self) -> list[EtcdMember]:
        leader = self._cluster.leader()
        others = [member for member in self._cluster.members if member is not leader]
        self._victims = [leader, *others][: self._members]
        return self._victims


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Run an etcd of three that may be broken."""
    with EtcdCluster(3, tls=True, password="secret") as cluster:
        yield cluster


LOSSES = [
    pytest.param(1, EtcdRestart(seconds=6.0, when=When(step=8)), id="its leader is killed"),
    pytest.param(1, EtcdPause(seconds=6.0, when=When(step=8)), id="its leader is stopped", marks=pytest.mark.slow),
    pytest.param(2, EtcdRestart(seconds=8.0, when=When(step=8)), id="quorum is lost", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("members", "fault"), LOSSES)
def test_a_job_survives_the_loss_of_etcd_members(
    members: int, fault: Fault, cluster: EtcdCluster, quiet: Quiet, tmp_path: Path
) -> None:
    """For longer than every lease and grace: training goes on in the same generation, to the same bits."""
    assert cluster.certificates is not None
    secret = tmp_path / "password"
    secret.write_text("secret\n")
    conf = {"ca": str(cluster.certificates.ca), "user": "root", "password_file": str(secret)}
    outcome = play(
        dataclasses.replace(LONG, nodes=3, conf=conf),
        [fault],
        etcd=Part(cluster, members),
        workdir=tmp_path / "job",
    )
    held(outcome, quiet(LONG))
    assert [view.cause for view in outcome.picture.generations] == ["start"]
