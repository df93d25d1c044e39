"""A real job on an etcd of three with TLS and a password: parts of it fail, and no bit and no generation changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.faults.etcd import EtcdMemberPause, EtcdMemberRestart
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.playing.play import play
from chaos.servers.etcd import EtcdCluster
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]


@pytest.fixture
def cluster() -> Iterator[EtcdCluster]:
    """Run an etcd of three that may be broken."""
    with EtcdCluster(3, tls=True, password="secret") as cluster:
        yield cluster


LOSSES = [
    pytest.param(EtcdMemberRestart(seconds=6.0, when=When(step=8)), id="its leader is killed"),
    pytest.param(EtcdMemberPause(seconds=6.0, when=When(step=8)), id="its leader is stopped", marks=pytest.mark.slow),
    pytest.param(
        EtcdMemberRestart(members=2, seconds=8.0, when=When(step=8)), id="quorum is lost", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("fault", LOSSES)
def test_a_job_survives_the_loss_of_etcd_members(
    fault: Fault, cluster: EtcdCluster, quiet: Quiet, tmp_path: Path
) -> None:
    """For longer than every lease and grace: training goes on in the same generation, to the same bits."""
    assert cluster.certificates is not None
    secret = tmp_path / "password"
    secret.write_text("secret\n")
    conf = {"ca": str(cluster.certificates.ca), "user": "root", "password_file": str(secret)}
    outcome = play(
        dataclasses.replace(LONG, nodes=3, conf=conf),
        [fault],
        etcd=cluster,
        workdir=tmp_path / "job",
    )
    held(outcome, quiet(LONG))
    assert [view.cause for view in outcome.picture.generations] == ["start"]
