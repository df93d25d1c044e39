"""Which node writes the curves of a run, and what its keeper gives it to write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic3d.distrust import Distrust
from elastic3d.port import StateRestored
from elastic3d.rollback import Rollback
from elastic3d.trackers.choice import Named
from elastic3d.trackers.names import OURS
from elastic3d.trackers.points import Void
from elastic3d.values import Cause, Generation, Layout, Node, Slot
from elastic3d.worker.keeper.curves import Curves, values_of, voids
from tests.trackers.heard import Shelf, Shelved, eventually
from tests.worker.keeper.test_progress import RECORD


def node(name: str, incarnation: str = "1") -> Node:
    return Node(name=name, incarnation=incarnation, address="::1", slots=(Slot(tile_port=1),))


A, B, C = node("a"), node("b"), node("c")


def generation(number: int, *nodes: Node, writer: int = 0, **more: Any) -> Generation:
    return Generation(number=number, cause=Cause.JOIN, nodes=nodes, writer=writer, layout=Layout(dp=len(nodes)), **more)


def state(step: int, *, number: int = 1, loss: str = "") -> StateRestored:
    return StateRestored(source="memory" if step else "none", step=step, generation=number, loss=loss)


class Keeping:
    """A node's curves."""

    def __init__(self, me: Node, shelf: Shelf) -> None:
        self.me, self.tracker = me, Shelved(shelf)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.curves = Curves([Named(name="shelf", tracker=self.tracker)], run_id="r", emit=self._emit)

    def _emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def steps(self, formed: Generation, first: int, last: int, **more: Any) -> None:
        for step in range(first, last + 1):
            self.curves.stepped(replace(RECORD, step=step, generation=formed.number, **more), formed)

    def close(self) -> None:
        self.curves.finish()
        self.curves.wait()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def pair(shelf: Shelf) -> Iterator[tuple[Keeping, Keeping]]:
    nodes = Keeping(A, shelf), Keeping(B, shelf)
    yield nodes
    for one in nodes:
        one.close()


def test_one_node_writes_and_another_goes_on_when_it_is_gone(shelf: Shelf, pair: tuple[Keeping, Keeping]) -> None:
    """The second wrote nothing before, and begins with the steps that the first had not written."""
    first, second = pair
    formed = generation(1, A, B)
    for one in pair:
        one.curves.began(formed, one.me)
        one.curves.restored(state(0))
        one.steps(formed, 1, 5)
    assert eventually(lambda: len(shelf.sent) == 5)
    assert second.tracker.opened == 0
    shelf.broken = True
    for one in pair:
        one.steps(formed, 6, 8)
    first.curves.stop()
    shelf.broken = False
    after = generation(2, C, B, writer=1)
    second.curves.began(after, B)
    second.curves.restored(state(7))
    second.steps(after, 8, 9)
    assert eventually(lambda: 9 in shelf.points)
    assert shelf.sent == list(range(1, 10))
    assert [name for name, _ in second.events] == ["tracker.opened"]


def test_a_step_that_nobody_told_of_has_the_loss_that_the_state_after_it_knows(
    shelf: Shelf, pair: tuple[Keeping, Keeping]
) -> None:
    """All that told of it are gone. The step has its point, one that was heard of stays, and nothing is a gap."""
    first, second = pair
    formed = generation(1, A, B)
    for one in pair:
        one.curves.began(formed, one.me)
        one.curves.restored(state(0))
        one.steps(formed, 1, 5)
    assert eventually(lambda: len(shelf.sent) == 5)
    first.curves.stop()
    for number, step in ((2, 6), (3, 6)):
        second.curves.began(generation(number, B), B)
        second.curves.restored(state(step, number=1, loss=(0.5 * number).hex()))
    second.steps(generation(3, B), 7, 8)
    second.curves.restored(state(8, number=3, loss=(9.0).hex()))
    assert eventually(lambda: 8 in shelf.points)
    second.close()
    assert shelf.sent == list(range(1, 9))
    assert shelf.points[6] == {"loss": 1.0, "generation": 1}
    assert [shelf.points[step]["loss"] for step in (5, 7, 8)] == [1.25, 1.25, 1.25]
    assert [name for name, _ in second.events] == ["tracker.opened"]


def test_a_record_that_names_another_node_ends_the_writing(shelf: Shelf, pair: tuple[Keeping, Keeping]) -> None:
    """Before this node's trainers know of it; a node of the same name that came back is another one."""
    first, _ = pair
    formed = generation(1, A, B)
    first.curves.began(formed, A)
    first.curves.restored(state(0))
    first.steps(formed, 1, 2)
    assert eventually(lambda: len(shelf.sent) == 2)
    first.curves.sealed(generation(2, node("a", "2"), B), A)
    assert eventually(lambda: first.tracker.closed)
    first.steps(formed, 3, 4)
    first.close()
    assert shelf.sent == [1, 2]
    assert [name for name, _ in first.events] == ["tracker.opened"]


def test_nothing_is_written_while_etcd_is_away(shelf: Shelf, pair: tuple[Keeping, Keeping]) -> None:
    """Training may go on, and what it makes is written when etcd is back."""
    first, _ = pair
    formed = generation(1, A, B)
    first.curves.began(formed, A)
    first.curves.restored(state(0))
    first.steps(formed, 1, 2)
    assert eventually(lambda: len(shelf.sent) == 2)
    first.curves.etcd(there=False)
    first.steps(formed, 3, 4)
    assert eventually(lambda: first.tracker.closed)
    assert shelf.sent == [1, 2]
    first.curves.etcd(there=True)
    assert eventually(lambda: shelf.sent == [1, 2, 3, 4])


def test_a_node_that_ends_without_etcd_writes_nothing_and_says_so(shelf: Shelf) -> None:
    """It may have been put out; others have its points."""
    one = Keeping(A, shelf)
    formed = generation(1, A, B)
    one.curves.began(formed, A)
    one.curves.restored(state(0))
    assert eventually(lambda: one.tracker.opened)
    one.curves.etcd(there=False)
    one.steps(formed, 1, 4)
    one.close()
    assert shelf.sent == []
    (unwritten,) = [fields for name, fields in one.events if name == "tracker.unwritten"]
    assert (unwritten["steps"], unwritten["count"]) == ([1, 4], 4)
    assert "etcd was away" in unwritten["error"]


def test_a_run_that_goes_back_leaves_out_what_it_made(shelf: Shelf, pair: tuple[Keeping, Keeping]) -> None:
    """Also in the memory of the node that writes next, and for steps that it hears of too late."""
    shelf.forgets = True
    first, second = pair
    formed = generation(1, A, B)
    for one in pair:
        one.curves.began(formed, one.me)
        one.curves.restored(state(0))
        one.steps(formed, 1, 6)
    assert eventually(lambda: len(shelf.sent) == 6)
    first.curves.stop()
    back = Rollback(before=2, step=3, spike=7, first=30, stop=80)
    after = generation(2, B, rollbacks=(back,), distrusted=(Distrust(before=2, step=0),))
    second.curves.began(after, B)
    second.steps(formed, 4, 4)
    second.curves.restored(state(2))
    second.steps(after, 3, 5, loss=9.0)
    assert eventually(lambda: 5 in shelf.points)
    second.close()
    assert sorted(shelf.points) == [1, 2, 3, 4, 5]
    assert [shelf.points[step]["loss"] for step in sorted(shelf.points)] == [1.25, 1.25, 1.25, 9.0, 9.0]


def test_what_a_device_computed_wrongly_is_left_out() -> None:
    """A rule about states says as much of points; where the run went back, its own step counts."""
    rules = (Distrust(before=4, step=10), Distrust(before=6, step=20))
    back = Rollback(before=6, step=25, spike=30, first=250, stop=310)
    formed = generation(7, A, distrusted=rules, rollbacks=(back,))
    assert voids(formed) == (Void(before=4, step=10), Void(before=6, step=25))


def test_values_of_a_step() -> None:
    """Samples that are left out do not count; a step that took no time has no rate."""
    formed = generation(2, A, B)
    record = replace(RECORD, step=3, samples=(20, 30), excluded=((22, 24),), seconds=0.5, gradient_norm=1.5)
    assert values_of(record, formed) == {
        "loss": 1.25,
        "gradient_norm": 1.5,
        "step_seconds": 0.5,
        "samples_per_second": 16.0,
        "generation": 2,
        "nodes": 2,
        "ranks": 2,
    }
    assert "samples_per_second" not in values_of(replace(record, seconds=0.0, loss=math.nan), formed)


def test_without_trackers_nothing_is_kept() -> None:
    """Nobody pays for curves that nobody asked for."""
    curves = Curves([], run_id="r", emit=pytest.fail)
    formed = generation(1, A)
    curves.began(formed, A)
    curves.stepped(RECORD, formed)
    curves.finish()
    curves.wait()
    assert curves._points.newest == 0


def test_what_the_script_logs_is_written_beside_our_own_numbers() -> None:
    """None of ours can have a name that a script may give: all of them are refused there."""
    record = replace(RECORD, step=3, gradient_norm=0.5, logged={"lr": 0.1, "eval/accuracy": 0.75})
    ours = values_of(replace(record, logged={}), generation(2, A))
    assert ours.keys() <= OURS
    assert values_of(record, generation(2, A)) == {**ours, "lr": 0.1, "eval/accuracy": 0.75}
