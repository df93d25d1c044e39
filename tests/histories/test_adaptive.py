"""A global batch that follows the gradient's noise, in a real job that loses a node and gains one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.history.follow import ledger
from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, faults

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

ADAPTIVE = Path(__file__).parent / "scripts" / "adaptive.py"


def test_sizes_are_the_same_after_a_death_and_a_join(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Whatever is made again decides again what it had decided; every change is told with its reason."""
    setting = replace(LONG, script=ADAPTIVE)
    undisturbed = quiet(setting)
    outcome = play(setting, faults("1@6", "@12"), etcd=job_etcd, workdir=tmp_path / "job")
    assert not outcome.failure, outcome.logs
    # The oracle of other histories expects every step to have one size.
    assert (outcome.digest, outcome.picture.losses) == (undisturbed.digest, undisturbed.picture.losses)
    assert [step.samples for step in outcome.picture.steps] == [step.samples for step in undisturbed.picture.steps]
    account = ledger(outcome.picture.steps)
    assert (account.repeated, account.missing, outcome.picture.conflicts) == (0, 0, ())
    assert len({stop - first for first, stop in (step.samples for step in outcome.picture.steps)}) >= 3
    assert [view.cause for view in outcome.picture.generations] == ["start", "death", "join"]
    told = {event.fields["step"]: event.fields["detail"] for event in outcome.events if event.name == "batch.resized"}
    assert len(told) >= 2
    assert all("the global batch is " in detail for detail in told.values())
