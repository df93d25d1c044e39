"""Real jobs that begin with the weights of another run, which are in an object store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from chaos.servers.proxied_store import proxied_store
from checkpointing import open_checkpoint, open_store
from tests.histories.conftest import Quiet
from tests.histories.scripts.begun_with_weights import WEIGHTS
from tests.histories.test_histories import LONG, SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.s3, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "begun_with_weights.py"


def test_a_run_goes_on_from_the_weights_of_another(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads its share; lost nodes cost no bit, and checkpoints say what was read."""
    with proxied_store() as (url, proxy):
        first = replace(SMALL, steps=10, store=f"{url}/first", proxy=proxy)
        before = play(first, (), etcd=job_etcd, workdir=tmp_path / "first")
        assert not before.failure, before.logs
        monkeypatch.setenv(WEIGHTS, f"{before.store}@latest")
        setting = replace(LONG, script=SCRIPT)
        undisturbed = play(replace(setting, nodes=1), (), etcd=job_etcd, workdir=tmp_path / "quiet")
        outcome = held(play(setting, faults("1@4", "@10"), etcd=job_etcd, workdir=tmp_path / "job"), undisturbed)
        assert [view.cause for view in outcome.picture.generations] == ["start", "death", "join"]
        anew = quiet(LONG)
        assert undisturbed.picture.losses[0] < anew.picture.losses[0]
        weights = open_checkpoint(open_store(outcome.store, write=False)).facts["weights"]
        assert weights["named"] == f"{before.store}@latest"
