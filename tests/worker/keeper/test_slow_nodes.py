"""What a keeper tells people and the membership of nodes that are slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic3d.health import sheet
from elastic3d.health.options import Watching
from elastic3d.health.sheet import StepSheet
from elastic3d.health.slow_node import SlowKind, SlowNode, SpeedFinding
from elastic3d.health.speeds import Speeds
from elastic3d.membership import events as m
from elastic3d.membership.slowness import Slowness
from elastic3d.pace import Pace
from elastic3d.port import StepRecord
from elastic3d.values import Cause, Generation, Layout, Node, Schedule, Slot
from elastic3d.worker.keeper.slow_nodes import SlowNodes
from elastic3d.worker.pulse import Figures

RECORD = StepRecord(
    generation=4,
    step=16,
    loss=1.0,
    gradient_norm=None,
    seconds=0.5,
    safe_step=15,
    etcd_away_everywhere=False,
    samples=(0, 8),
    sample_sum=0,
    sheets=((1.0,),),
)


@pytest.mark.parametrize("kind", SlowKind)
def test_people_and_the_membership_are_told(kind: SlowKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is slow about the node."""
    nodes = tuple(Node(name=name, incarnation="1", address="h", slots=(Slot(tile_port=1),)) for name in "ab")
    generation = Generation(number=4, attempt=17, cause=Cause.START, nodes=nodes, layout=Layout(pp=1, dp=2))
    slow = SlowNode(id=nodes[1].id, rho=1.5, kind=kind, since=9, ranks=(1,))
    finding = SpeedFinding(key=generation.key, step=16, slow={slow.id: slow}, entered=(slow,))
    monkeypatch.setattr(Speeds, "heard", lambda *given: finding)
    emitted: list[tuple[str, dict[str, Any]]] = []
    heard: list[m.Event] = []
    keeper = SlowNodes(
        Watching(), emit=lambda name, **fields: emitted.append((name, fields)), tell=heard.append, figures=Figures()
    )
    keeper.begin(generation, first=True)
    keeper.stepped(RECORD)
    assert [(name, fields["kind"]) for name, fields in emitted] == [("node.slow", kind)]
    (event,) = heard
    assert isinstance(event, m.NodesSlow)
    assert event.slow == {slow.id: Slowness(rho=1.5, kind=kind, since=9)}


def row(busy: float) -> tuple[float, ...]:
    """Return a rank's row of steps of a second."""
    return StepSheet(work=1.0, rounds=4, forward=busy / 3, backward=2 * busy / 3, wait_pp=1.0 - busy).row


def test_a_keeper_that_was_not_there_tells_the_membership_who_is_slow_by_the_record() -> None:
    """It may hold rank 0, and speaks for all: what it has not seen to be over still holds."""
    nodes = tuple(Node(name=name, incarnation="1", address="h", slots=(Slot(tile_port=1),)) for name in "ab")
    pace = Pace(place="b", rho=1.6, kind="compute", uses=1.0)
    layout = Layout(pp=2, dp=1, schedule=Schedule.ONE_F_ONE_B)
    generation = Generation(number=4, cause=Cause.DEATH, nodes=nodes, layout=layout, paces=(pace,))
    heard: list[m.Event] = []
    keeper = SlowNodes(Watching(), emit=lambda name, **fields: None, tell=heard.append, figures=Figures())
    keeper.begin(generation, first=True)
    for step in range(1, 121):
        rows = [row((0.5, 0.7)[rank]) for rank in sheet.speakers(step, 2)]
        keeper.stepped(replace(RECORD, step=step, sheets=tuple(rows)))
    said = [set(event.slow) for event in heard if isinstance(event, m.NodesSlow)]
    assert said
    assert all(slow == {nodes[1].id} for slow in said)


def test_people_are_told_of_a_slow_node_in_each_generation() -> None:
    """Once, when it shows there, with what it costs there: what is told is accounted for in its own generation."""
    emitted: list[tuple[str, dict[str, Any]]] = []
    keeper = SlowNodes(
        Watching(),
        emit=lambda name, **fields: emitted.append((name, fields)),
        tell=lambda event: None,
        figures=Figures(),
    )
    nodes = tuple(Node(name=name, incarnation="1", address="h", slots=(Slot(tile_port=1),)) for name in "abc")
    # In the second one b has another rank, and the run has gone back behind the step from which on it was slow.
    for number, order, first, slow in ((1, "abc", 1, 57), (2, "cab", 41, 0), (3, "cab", 161, 1000)):
        members = tuple(nodes["abc".index(name)] for name in order)
        layout = Layout(pp=1, dp=3)
        keeper.begin(Generation(number=number, cause=Cause.START, nodes=members, layout=layout), first=True)
        for step in range(first, first + 120):
            busy = [0.9 if name == "b" and step >= slow else 0.6 for name in order]
            rows = [row(busy[rank]) for rank in sheet.speakers(step, 3)]
            keeper.stepped(replace(RECORD, step=step, sheets=tuple(rows)))
    said = [(name, fields["generation"], fields["ranks"]) for name, fields in emitted]
    assert said == [("node.slow", 1, [1]), ("node.slow", 2, [2]), ("node.well", 3, [2])]
    (_, one), (_, other), _ = emitted
    assert one["since"] > 48
    assert other["since"] < 48
    assert one["cost"] == other["cost"] > 0.0
