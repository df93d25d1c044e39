"""What a node tells the membership when its trainers end because a device was convicted."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from elastic3d.membership import events as m
from elastic3d.membership.policy import Policy
from elastic3d.port import Assignment, Audited, AuditReport
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import Cause, Generation, Layout, Node, Slot
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures
from tests.clocks import HandClock
from tests.worker.checkpoints.test_checkpoints import Memory

CULPRIT = 2
NODES = tuple(Node(name=f"n{i}", incarnation="i", address="h", slots=(Slot(tile_port=1),)) for i in range(3))
FORMED = Generation(number=1, cause=Cause.START, nodes=NODES)


class Slots(Memory):
    """A slot whose trainers are stopped at once."""

    def stop(self, trainer: int) -> None:
        pass


class Scene:
    """A node whose first rank is `rank`, in a generation of three; `told` is what the membership received."""

    def __init__(self, rank: int, slots: int = 1) -> None:
        self.told: list[m.Event] = []
        self.generations = Generations(
            cast(Settings, None),
            RunOptions(),
            [cast(SlotPort, Slots()) for _ in range(slots)],
            self.told.append,
            journal=Journal(None, "run", "n"),
            figures=Figures(),
        )
        trainers = {slot: slot + 1 for slot in range(slots)}
        self.generations.worlds[FORMED.key] = TrainerGroup(generation=FORMED, first_rank=rank, trainers=trainers)

    def hears(self, kind: Audited) -> None:
        """Let its trainers say what was found."""
        report = AuditReport(kind=kind, detail="two against one", ranks=(CULPRIT,), nodes=("n2",), clean=8)
        self.generations.heard(w.AuditHeard(slot=0, trainer=1, report=report))

    def ends(self, kind: w.ExitKind, slot: int = 0) -> None:
        """Let a trainer end."""
        self.generations.heard(w.TrainerExited(slot=slot, trainer=slot + 1, kind=kind, step=9, code=86))


@pytest.mark.parametrize("how", [w.ExitKind.CONVICTED, w.ExitKind.STOPPED], ids=str)
@pytest.mark.parametrize("kind", [Audited.LYING, Audited.SPLIT], ids=str)
@pytest.mark.parametrize("rank", [0, CULPRIT], ids=["witness", "culprit"])
def test_witnesses_name_the_node_that_computes_wrongly(kind: Audited, rank: int, how: w.ExitKind) -> None:
    """It says so itself; the others say whom they heard convicted, and name nobody for an accident.

    Also where a death has them stopped before they could end by themselves.
    """
    scene = Scene(rank)
    scene.hears(kind)
    scene.ends(how)
    (event,) = scene.told
    lying = kind is Audited.LYING
    if rank == CULPRIT:
        assert isinstance(event, m.TrainerFailed)
        assert (event.accused, event.clean) == ({NODES[CULPRIT].id: NODES[CULPRIT].place} if lying else {}, 8)
    else:
        assert isinstance(event, m.TrainerLostPeer)
        assert (event.accused, event.clean) == ({NODES[CULPRIT].id: NODES[CULPRIT].place} if lying else {}, 8)


def test_an_accident_of_a_node_with_two_slots_is_one() -> None:
    """Both trainers end by it. A second one within the hour would have the machine set aside."""
    scene = Scene(CULPRIT, slots=2)
    scene.hears(Audited.SPLIT)
    scene.ends(w.ExitKind.CONVICTED)
    scene.ends(w.ExitKind.CONVICTED, slot=1)
    (event,) = scene.told
    assert isinstance(event, m.TrainerFailed)
    assert event.accused == {}


class Preparing(Memory):
    """A slot that keeps what its trainers were assigned, and numbers them by generation."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.assigned: list[Assignment] = []

    def prepare(self, assignment: Assignment) -> int:
        self.assigned.append(assignment)
        return assignment.generation


def test_the_next_generation_knows_how_long_ago_a_device_erred() -> None:
    """Of the slot whose rank it was; of what two ends of a link have otherwise, neither is known to have erred."""
    clock = HandClock()
    slots = [Preparing(index) for index in range(2)]
    generations = Generations(
        Settings(endpoints="", run_id="run", mode="resident", node="n1", address="127.0.0.1", policy=Policy()),
        RunOptions(),
        [cast(SlotPort, slot) for slot in slots],
        lambda event: None,
        journal=Journal(None, "run", "n1"),
        figures=Figures(),
        clock=clock,
    )
    places = (Slot(tile_port=1), Slot(tile_port=2))
    nodes = tuple(Node(name=f"n{i}", incarnation="i", address="h", slots=places) for i in range(3))
    formed = Generation(number=1, cause=Cause.START, nodes=nodes, layout=Layout(pp=1, dp=6))
    generations.prepare(formed, nodes[1])
    report = AuditReport(kind=Audited.FAILED, detail="", finding="transient", compared="passes", ranks=(3,))
    heard = [
        report,
        replace(report, finding="persistent", ranks=(2,)),
        replace(report, kind=Audited.REDONE, ranks=(2,)),
        replace(report, compared="transit", ranks=(1, 2)),
        replace(report, ranks=(4, 5)),
    ]
    for one in heard:
        for slot in (0, 1):
            generations.heard(w.AuditHeard(slot=slot, trainer=1, report=one))
    clock.now += 600.0
    for number in (2, 3):
        generations.prepare(replace(formed, number=number), nodes[1])
    assert [[one.accident for one in slot.assigned] for slot in slots] == [[None] * 3, [None, 600.0, 600.0]]
