"""How a node leaves: pure decisions, and signals to any of its keepers."""

from __future__ import annotations

import dataclasses
import os
import signal

import pytest

from elastic3d.values import Cause, Generation, Layout, Node, Slot
from elastic3d.worker.keeper.departure import MARGIN, Departure, refuge
from elastic3d.worker.processes.events import SlotLost, SlotSignalled
from tests.worker.keepers import Nursery


def node(name: str, slots: int = 1) -> Node:
    return Node(name=name, incarnation="1", address="host", slots=(Slot(tile_port=1),) * slots)


def generation(*names: str, spares: str = "") -> Generation:
    return Generation(
        number=1,
        attempt=0,
        cause=Cause.START,
        nodes=tuple(map(node, names)),
        spares=tuple(map(node, spares)),
        layout=Layout(),
        leader=names[0],
        detail="",
    )


def test_a_signal_to_every_keeper_is_one_signal() -> None:
    """torchrun passes its signal to all keepers of the node; only a second to the same one is a second signal."""
    departure = Departure()
    assert [departure.signalled(slot) for slot in (1, 0, 2)] == [False, False, False]
    assert departure.signalled(2)


def test_the_earliest_deadline_counts() -> None:
    """An operator's hour does not extend a cloud's half minute."""
    departure = Departure()
    assert not departure.over(1e9)
    assert departure.within(30.0, now=100.0)
    assert not departure.within(3600.0, now=101.0)
    assert not departure.within(None, now=102.0)
    assert departure.deadline == 130.0
    assert departure.over(130.0)
    assert not departure.over(129.9)


def test_snapshots_held_only_by_a_leaving_node_get_all_its_time() -> None:
    """Without a deadline the ordinary patience holds; a moment before the end is kept for leaving in order."""
    departure = Departure()
    assert departure.waits_until(50.0, ordinary=2.0) == 52.0
    departure.within(None, now=40.0)
    assert departure.waits_until(50.0, ordinary=2.0) == 52.0
    departure.within(25.0, now=40.0)
    assert departure.waits_until(50.0, ordinary=2.0) == 65.0 - MARGIN
    departure.within(2.0, now=40.0)
    assert departure.waits_until(41.0, ordinary=2.0) == 42.0 - 0.5
    departure.at_once = True
    assert departure.waits_until(41.0, ordinary=2.0) == 41.0


def test_a_node_that_leaves_with_its_buddy_gets_another() -> None:
    """A node that stays holds its snapshots, a present member if there is one."""
    running = generation("a", "b", "c")
    assert refuge(node("a"), node("b"), running, generation("c", "d")) == node("c")
    assert refuge(node("a"), node("b"), running, generation("d", spares="c")) == node("c")
    assert refuge(node("a"), node("b"), running, generation("d")) == node("d")


def test_the_only_node_leaves_its_snapshots_with_its_successor() -> None:
    """It has no buddy, and is gone before the newcomer could have fetched anything from it."""
    assert refuge(node("a"), None, generation("a"), generation("d")) == node("d")
    assert refuge(node("a"), None, generation("a", spares="c"), generation("c", "d")) == node("c")


def test_refuge_is_sought_only_when_needed() -> None:
    """A node that stays keeps its own; if its buddy stays a copy is there; if nobody comes there is no refuge."""
    running = generation("a", "b", "c")
    assert refuge(node("a"), node("b"), running, generation("a", "c")) is None
    assert refuge(node("a"), node("b"), running, generation("c", spares="a")) is None
    assert refuge(node("a"), node("b"), running, generation("b", "c")) is None
    assert refuge(node("a"), None, generation("a"), generation("a", "d")) is None
    assert refuge(node("a"), None, generation("a"), dataclasses.replace(generation("a"), nodes=())) is None


def test_refuge_needs_a_slot_for_each_slot() -> None:
    """Each slot sends to its counterpart, so a node of another size cannot hold them."""
    other = Generation(
        number=2, attempt=0, cause=Cause.DRAIN, nodes=(node("d", slots=2),), layout=Layout(), leader="d", detail=""
    )
    assert refuge(node("a"), node("b"), generation("a", "b"), other) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_companions_signal_counts_for_its_node(nursery: Nursery, number: signal.Signals) -> None:
    """The first keeper is told and decides; the companion stays until its connection ends."""
    keeper = nursery.keeper("counts", index=1)
    os.kill(keeper.pid, number)
    assert keeper.wait(SlotSignalled) == SlotSignalled(slot=1, number=number)
    os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait(SlotLost)
