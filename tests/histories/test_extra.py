"""What a script keeps of its own, in real jobs that lose a node and gain one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from checkpointing import open_checkpoint, open_store, read_latest
from tests.histories.conftest import Quiet
from tests.histories.test_histories import LONG, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

AVERAGED = Path(__file__).parent / "scripts" / "averaged.py"


def test_an_average_survives_the_loss_of_a_node_and_a_join(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The digest covers it: no update of it is missing or made twice, after a death or at a planned change."""
    setting = replace(LONG, script=AVERAGED)
    outcome = held(play(setting, faults("1@6", "@12"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(setting))
    assert [view.cause for view in outcome.picture.generations] == ["start", "death", "join"]
    assert {view.restored_from for view in outcome.picture.generations[1:]} == {"memory"}
    assert outcome.picture.generations[2].steps_repeated == 0
    store = open_store(outcome.store, write=False)
    latest = read_latest(store)
    assert latest is not None
    assert latest.checkpoint is not None
    saved = open_checkpoint(store, latest.checkpoint)
    keys = {offer.spec.key for offer in saved.offers("store")}
    assert {"extra/ema/n_averaged", "extra/ema/module.head.weight", "extra/losses/sum"} <= keys
    assert {name: one["kind"] for name, one in saved.facts["extra"].items()} == {
        "ema": "AveragedModel",
        "losses": "Losses",
    }
