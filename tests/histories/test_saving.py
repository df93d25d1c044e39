"""Checkpoints of a job of real processes: continuous, collected, and whole whatever happens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from checkpointing import open_checkpoint, open_store, read_ref, verify
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, faults, held
from tests.training.damage import spoil_tiles

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

CONTINUOUS = dataclasses.replace(SMALL, options=("--checkpoint-every=continuous", "--keep=2", "--pause=0.05"))


def test_continuous_saving_survives_a_death(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The next checkpoint begins when the last is committed, and all ranks write the same steps."""
    outcome = held(play(CONTINUOUS, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    (place,) = (tmp_path / "job" / "store").rglob("checkpoints")
    store = open_store(str(place.parent), write=False)
    checkpoint = open_checkpoint(store)
    assert checkpoint.step == max(outcome.picture.checkpoints)
    verified = read_ref(store, "verified")
    assert verified is not None
    assert verified.step == checkpoint.step
    assert [finding for finding in verify(store) if finding.checkpoints] == []
    logged = events(tmp_path / "job")
    committed = [event["step"] for event in logged if event["event"] == "checkpoint.committed"]
    written = {event["step"] for event in logged if event["event"] == "checkpoint.written"}
    assert len(committed) >= 4
    # Saves written by all but not committed are at most those that the death and the end interrupted.
    assert len(written - set(committed)) <= 2, (sorted(written), committed)


@pytest.mark.long
def test_all_ranks_fall_back_together_from_a_damaged_checkpoint(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """A job restarted after its newest checkpoint was damaged goes on from the one before, and says so."""
    url = (tmp_path / "store").as_uri()
    setting = dataclasses.replace(SMALL, nodes=2, options=(*SMALL.options, f"--store={url}"))
    first = play(setting, [], etcd=job_etcd, workdir=tmp_path / "first")
    assert not first.failure, first.logs
    # On a machine that stands still for a moment a save is left out for the next one.
    *older, newest = sorted(first.picture.checkpoints)
    assert newest == SMALL.steps
    spoil_tiles(open_store(url), newest, older)
    second = play(setting, [], etcd=job_etcd, workdir=tmp_path / "second")
    assert not second.failure, second.logs
    assert second.digest == first.digest == quiet(SMALL).digest
    restored = [event for event in events(tmp_path / "second") if event["event"] == "state.restored"]
    assert {(event["source"], event["step"]) for event in restored} == {("store", older[-1])}
    assert any("damaged" in (event["detail"] or "") for event in restored), restored


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in folder.rglob("*.jsonl") for line in file.read_text().splitlines()]
