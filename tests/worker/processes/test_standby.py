"""A slot's standby: it has its device open before it is the next trainer, and nothing else of it shows."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.gpu import emulated_device
from chaos.machine.cluster import stands_by
from elastic3d.port import Go
from elastic3d.worker.processes.events import (
    ExitKind,
    ProfileMeasured,
    Restored,
    Started,
    StepFinished,
    TrainerExited,
    TrainerReady,
)
from tests.worker.keepers import Keeper, Nursery, assignment, children, eventually, gone

GO = Go(servers=())


class Slot:
    """A slot whose trainers hold the memory of an emulated device, with what they and its keeper said."""

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self.keeper, self._folder = keeper, folder
        self._generation = self.others = 0

    def train(self, *, device: str = emulated_device.KIND, standby: bool = True, **changes: Any) -> int:
        """Start the trainer of the next generation; return its pid once it has made some steps."""
        self._generation += 1
        free = emulated_device.CAPACITY - emulated_device.CONTEXT - self.others
        given = {"device": device, "standby": standby, "device_free": free if device != "cpu" else 0, **changes}
        trainer = self.keeper.slot.prepare(assignment(generation=self._generation, **given))
        pid = self.keeper.wait(Started).pid
        self.keeper.wait(TrainerReady)
        self.keeper.slot.go(trainer, GO)
        self.keeper.wait(Restored)
        self.keeper.wait(StepFinished, where=lambda event: event.record.step == 5)
        return pid

    def standbys(self) -> list[int]:
        return [pid for pid in children(self.keeper.template) if stands_by(pid)]

    def said(self, event: str, times: int = 1) -> bool:
        return self.keeper.output.read_text().count(event) >= times

    def standby(self, times: int = 1) -> int:
        """Return the pid of the standby, once the slot has had so many that were warm."""
        assert eventually(lambda: self.said("standby.ready", times), 30), self.keeper.output.read_text()
        (pid,) = self.standbys()
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        assert self.keeper.wait(TrainerExited).kind is ExitKind.CRASH

    def told(self) -> Any:
        """Return what the newest trainer was like when it began."""
        return json.loads((self._folder / str(self._generation)).read_text())

    def hold(self, nbytes: int) -> None:
        """Hold memory of the device, as another job's process would."""
        self.others = nbytes
        file = self._folder / "devices" / "node-0" / str(os.getpid())
        file.parent.mkdir()
        file.write_text(str(nbytes))

    def held(self, pid: int) -> int:
        """Return the bytes that a process holds of the device."""
        (file,) = self._folder.glob(f"devices/*/{pid}")
        return int(file.read_text())


MakeSlot = Callable[..., Slot]


@pytest.fixture
def slot(nursery: Nursery, tmp_path: Path) -> MakeSlot:
    (tmp_path / "devices").mkdir()

    def make(**variables: str) -> Slot:
        devices = {emulated_device.FOLDER: str(tmp_path / "devices"), "ELASTIC3D_LOG": "debug"}
        given = {"NURSERY_TOLD": str(tmp_path), **devices, **variables}
        return Slot(nursery.keeper("on_device", variables=given), tmp_path)

    return make


def test_the_standby_is_the_next_trainer(slot: MakeSlot) -> None:
    """After a kill: the same process, and it has a standby of its own in turn."""
    one = slot()
    first = one.train()
    standby = one.standby()
    assert standby != first
    one.kill(first)
    assert one.train() == standby
    assert one.standby(2) not in (first, standby)


def test_a_trainer_that_is_not_let_go_leaves_another(slot: MakeSlot) -> None:
    """One made ready beside the running one takes the standby with it where the change is called off."""
    one = slot()
    one.train()
    standby = one.standby()
    beside = one.keeper.slot.prepare(assignment(generation=9, device=emulated_device.KIND, standby=True))
    assert one.keeper.wait(Started).pid == standby
    one.keeper.slot.stop(beside)
    assert one.keeper.wait(TrainerExited).trainer == beside
    assert one.standby(2) != standby


def test_a_trainer_that_ran_out_of_memory_leaves_none(slot: MakeSlot) -> None:
    """The next one has the device to itself."""
    one = slot()
    one.hold(60 << 20)
    trainer = one.keeper.slot.prepare(assignment(device=emulated_device.KIND, standby=True))
    one.keeper.slot.go(trainer, GO)
    assert one.keeper.wait(TrainerExited).kind is ExitKind.OUT_OF_MEMORY
    assert eventually(lambda: one.said("standby.off"))


def test_a_trainer_that_was_a_standby_begins_like_any_other(slot: MakeSlot) -> None:
    """Random numbers, torch's flags, environment, name and descriptors are those of a fork."""
    one = slot(GLOO_SOCKET_IFNAME="eth9")
    first = one.train(threads=2, interface="lo")
    fresh = one.told()["torch"]
    standby = one.standby()
    one.kill(first)
    assert one.train(threads=2, interface="lo") == standby
    assert one.told() == {"pid": standby, "torch": fresh}
    # Said by both trainers, though the standby had to set it as well.
    assert eventually(lambda: one.said("environment.replaced variables=['GLOO_SOCKET_IFNAME']", 2))


def test_its_memory_is_held_beside_the_trainers(slot: MakeSlot) -> None:
    """And what the planner is told of the device leaves room for it; see `test_a_place_for_the_standby_is_counted`."""
    one = slot()
    trainer = one.train()
    standby = one.standby()
    device = emulated_device.EmulatedDevice(0)
    assert one.held(standby) == emulated_device.CONTEXT == device.standby_bytes
    assert one.held(trainer) == emulated_device.CONTEXT + emulated_device.HELD


def test_a_place_for_the_standby_is_counted(nursery: Nursery) -> None:
    """What the planner leaves to a model, and what has to be free before a trainer builds, is without it."""
    keeper = nursery.keeper("measure")
    for standby, reserve in ((True, emulated_device.CONTEXT), (False, 0)):
        keeper.slot.measure(assignment(measuring=True, device=emulated_device.KIND, standby=standby))
        device = keeper.wait(ProfileMeasured).device
        assert device is not None
        assert device.reserve == reserve


def test_a_dead_standby_does_no_harm(slot: MakeSlot) -> None:
    """It is said, and the next trainer is forked."""
    one = slot()
    first = one.train()
    standby = one.standby()
    os.kill(standby, signal.SIGKILL)
    assert eventually(lambda: one.said("standby.failed"))
    one.kill(first)
    assert one.train() not in (first, standby)
    assert one.standby(2)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_standby_that_does_not_answer_is_replaced(slot: MakeSlot, number: signal.Signals) -> None:
    """Stopped, or killed at the same moment as the trainer: a trainer is forked, and nothing is left of the standby."""
    one = slot()
    first = one.train()
    standby = one.standby()
    os.kill(standby, number)
    one.kill(first)
    assert one.train() not in (first, standby)
    assert eventually(lambda: gone(standby))
    assert eventually(lambda: one.said("standby.failed"))


def test_a_standby_that_is_not_warm_yet_is_not_waited_for(slot: MakeSlot) -> None:
    """It is killed, and a trainer is forked at once."""
    one = slot()
    first = one.train()
    assert eventually(lambda: bool(one.standbys()))
    (standby,) = one.standbys()
    os.kill(standby, signal.SIGSTOP)
    one.kill(first)
    # On a busy machine it may have been warm before it was stopped: then it is asked.
    asked = one.said("standby.ready")
    assert one.train() != standby
    assert eventually(lambda: gone(standby))
    assert one.said("standby.failed") == asked


def test_without_room_there_is_none(slot: MakeSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that find too little memory free are the last."""
    monkeypatch.setenv(emulated_device.FOLDER, str(tmp_path / "devices"))
    device = emulated_device.EmulatedDevice(0)
    one = slot()
    one.hold(35 << 20)
    for times in (1, 2):
        trainer = one.train()
        assert eventually(lambda times=times: one.said("standby.failed", times), 30)  # type: ignore[misc]
        one.kill(trainer)
        assert eventually(lambda: device.free() == emulated_device.CAPACITY)
    assert one.said("standby.off")
    one.train()
    assert not eventually(lambda: bool(one.standbys()), 0.5)


@pytest.mark.parametrize("given", [{"device": "cpu"}, {"standby": False}], ids=str)
def test_none_is_forked_on_the_cpu_or_where_it_is_turned_off(slot: MakeSlot, given: dict[str, Any]) -> None:
    one = slot()
    first = one.train(**given)
    assert not eventually(lambda: bool(one.standbys()), 1.0)
    one.kill(first)
    assert one.train(**given)


def test_none_is_forked_where_main_sets_what_its_libraries_have_read(slot: MakeSlot) -> None:
    """A standby would have loaded them without it, and might compute other bits."""
    one = slot(NURSERY_SETS=json.dumps({"NVIDIA_TF32_OVERRIDE": "0", "ANY_OTHER": "1"}))
    one.train()
    assert eventually(lambda: one.said("main sets NVIDIA_TF32_OVERRIDE, which libraries read"))
    assert not eventually(lambda: bool(one.standbys()), 0.5)


def test_nothing_outlives_the_template_or_the_keeper(slot: MakeSlot) -> None:
    """It ends with its template, and is there again once the next one's trainer has made steps."""
    one = slot()
    one.train()
    standby, template = one.standby(), one.keeper.template
    os.kill(template, signal.SIGKILL)
    assert one.keeper.wait(TrainerExited).kind is ExitKind.TEMPLATE
    assert eventually(lambda: gone(standby))
    one.train()
    standby = one.standby(2)
    one.keeper.slot.close()
    assert eventually(lambda: gone(standby))
