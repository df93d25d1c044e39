"""What a node tells the membership when its trainers end because a device was convicted."""

from __future__ import annotations

from typing import cast

import pytest

from elastic3d.membership import events as m
from elastic3d.port import Audited, AuditReport
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import Cause, Generation, Node, Slot
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures
from tests.worker.checkpoints.test_checkpoints import Memory

CULPRIT = 2
NODES = tuple(Node(name=f"n{i}", incarnation="i", address="h", slots=(Slot(tile_port=1),)) for i in range(3))
FORMED = Generation(number=1, cause=Cause.START, nodes=NODES)


@pytest.mark.parametrize("kind", [Audited.LYING, Audited.SPLIT], ids=str)
@pytest.mark.parametrize("rank", [0, CULPRIT], ids=["witness", "culprit"])
def test_witnesses_name_the_node_that_computes_wrongly(kind: Audited, rank: int) -> None:
    """It says so itself; the others say whom they heard convicted, and name nobody for an accident."""
    told: list[m.Event] = []
    slots = [cast(SlotPort, Memory())]
    generations = Generations(
        cast(Settings, None), RunOptions(), slots, told.append, journal=Journal(None, "run", "n"), figures=Figures()
    )
    generations.worlds[FORMED.key] = TrainerGroup(generation=FORMED, first_rank=rank, trainers={0: 1})
    report = AuditReport(kind=kind, detail="two against one", ranks=(CULPRIT,), nodes=("n2",), clean=8)
    generations.heard(w.AuditHeard(slot=0, trainer=1, report=report))
    generations.heard(w.TrainerExited(slot=0, trainer=1, kind=w.ExitKind.CONVICTED, step=9, code=86))
    (event,) = told
    lying = kind is Audited.LYING
    if rank == CULPRIT:
        assert isinstance(event, m.TrainerFailed)
        assert (event.lying, event.clean) == (lying, 8)
    else:
        assert isinstance(event, m.TrainerLostPeer)
        assert (event.accused, event.clean) == ((NODES[CULPRIT].id,) if lying else (), 8)
