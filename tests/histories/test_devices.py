"""Histories on a device of which one trainer holds the memory at a time: emulated, where a second one runs out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chaos import emulated_device
from chaos.etcd import EtcdServer
from chaos.play import play
from chaos.scenario import parse_join, parse_kill
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

SCRIPT = Path(__file__).parent / "scripts" / "train_on_emulated_device.py"


def test_a_kill_and_a_join_find_the_device_free(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Survivors' new trainers after a death, and the trainers beside the running ones at a join, each wait for their
    turn, and for memory that comes back late; and the run ends with the bits of one on the CPU."""
    undisturbed = quiet(SMALL)
    monkeypatch.setenv("ELASTIC3D_DEVICE", emulated_device.KIND)
    monkeypatch.setenv(emulated_device.FOLDER, str(tmp_path / "devices"))
    setting = dataclasses.replace(SMALL, script=SCRIPT)
    outcome = play(setting, [parse_kill("1@6"), parse_join("@12")], etcd=job_etcd, workdir=tmp_path / "job")
    held(outcome, undisturbed)
    assert [view.cause for view in outcome.picture.generations][1:] == ["death", "join"]
    assert all(view.steps_repeated == 0 for view in outcome.picture.generations[2:])
    # Every trainer of every generation that trained here held memory, and none ran out of it.
    assert len(list((tmp_path / "devices").glob("*/*[0-9]"))) >= 4 + 3 + 4
    assert not any("out of memory" in log for log in outcome.logs.values())
