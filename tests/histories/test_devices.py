"""Histories on a device of which one trainer holds the memory at a time: emulated, where a second one runs out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chaos.gpu import emulated_device
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout
from tests.histories.conftest import Quiet
from tests.histories.test_histories import FIRST, FIVE, LONG, MORE, MOST, SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

SCRIPT = Path(__file__).parent / "scripts" / "train_on_emulated_device.py"


@pytest.fixture
def emulated(quiet: Quiet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Setting:
    """The small job, or the one that is asked for, on devices that are accounted for below the test's folder."""
    setting: Setting = getattr(request, "param", SMALL)
    quiet(setting)  # on the CPU, before there is another device
    monkeypatch.setenv("ELASTIC3D_DEVICE", emulated_device.KIND)
    monkeypatch.setenv(emulated_device.FOLDER, str(tmp_path / "devices"))
    return dataclasses.replace(setting, script=SCRIPT)


@pytest.mark.parametrize("emulated", [LONG], indirect=True, ids=["long"])
def test_a_kill_and_a_join_find_the_device_free(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, emulated: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Survivors' new trainers after a death, and the trainers beside the running ones at a join, each wait for their
    turn, and for memory that comes back late; and the run ends with the bits of one on the CPU. Some of the trainers
    were standbys before: what made them warm does not show in the bits."""
    monkeypatch.setenv("ELASTIC3D_LOG", "debug")
    # By then a standby is warm, and the job trains on until the node that comes is let in.
    outcome = play(emulated, faults("1@10", "@16"), etcd=job_etcd, workdir=tmp_path / "job")
    held(outcome, quiet(LONG))
    assert [view.cause for view in outcome.picture.generations][1:] == ["death", "join"]
    assert all(view.steps_repeated == 0 for view in outcome.picture.generations[2:])
    # Every trainer of every generation that trained here held memory, and none ran out of it.
    assert len(list((tmp_path / "devices").glob("*/*[0-9]"))) >= 4 + 3 + 4
    assert not any("out of memory" in log for log in outcome.logs.values())
    assert any("standby.taken" in log.read_text() for log in (tmp_path / "job").rglob("*.log"))


HISTORIES = {**FIRST, **MORE, **MOST}


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORIES)
def test_any_history_ends_with_the_bits_of_the_cpu(
    name: str, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, emulated: Setting
) -> None:
    """What happens to a job on CPUs, on devices that can hold one trainer each, copy late and give back late."""
    outcome = play(emulated, faults(*HISTORIES[name]), etcd=job_etcd, workdir=tmp_path / "job")
    held(outcome, quiet(SMALL))
    assert not any("out of memory" in log for log in outcome.logs.values())


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [FIVE], indirect=True, ids=["five blocks"])
@pytest.mark.parametrize("layout", [Layout(pp=1), Layout(pp=2, zero=2), Layout(pp=4)], ids=str)
def test_any_layout_ends_with_the_bits_of_the_cpu(
    layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, emulated: Setting
) -> None:
    """With a death, where the other nodes can go on without it."""
    setting = dataclasses.replace(emulated, layout=layout)
    asked = faults() if layout.pp == 4 else faults("2@8")
    held(play(setting, asked, etcd=job_etcd, workdir=tmp_path / "job"), quiet(FIVE))


@pytest.mark.slow
def test_two_slots_have_a_device_each(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path, emulated: Setting) -> None:
    """A thread that stays on device 0 is refused, and trainers of one node do not wait for each other's memory."""
    setting = dataclasses.replace(emulated, nodes=3, slots=2)
    outcome = play(setting, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job")
    held(outcome, quiet(SMALL))
    assert {folder.name[-2:] for folder in (tmp_path / "devices").iterdir()} == {"-0", "-1"}
