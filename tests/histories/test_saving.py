"""Checkpoints of a job of real processes: continuous, collected, and whole whatever happens."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from chaos.etcd import EtcdServer
from chaos.play import play
from checkpointing import open_checkpoint, open_store, read_ref, verify
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

CONTINUOUS = dataclasses.replace(SMALL, options=("--checkpoint-every=continuous", "--keep=2"))


def test_continuous_saving_beside_a_death(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The next checkpoint begins when the last is committed, no rank writes another step than the others."""
    outcome = held(play(CONTINUOUS, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    (place,) = (tmp_path / "job" / "store").rglob("checkpoints")
    store = open_store(str(place.parent), write=False)
    found = open_checkpoint(store)
    assert found.step == max(outcome.picture.checkpoints)
    verified = read_ref(store, "verified")
    assert verified is not None
    assert verified.step == found.step
    assert [finding for finding in verify(store) if finding.checkpoints] == []
    events = [
        json.loads(line) for file in (tmp_path / "job").rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    committed = [event["step"] for event in events if event["event"] == "checkpoint.committed"]
    written = {event["step"] for event in events if event["event"] == "checkpoint.written"}
    assert len(committed) >= 4
    # What was written by all and not committed is at most what the death, and the end, cut off.
    assert len(written - set(committed)) <= 2, (sorted(written), committed)
