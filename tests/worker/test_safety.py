"""Snapshots that no buddy takes: reported, and given to another one."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from elastic3d.membership.policy import Policy
from elastic3d.port import StateRestored, StepRecord
from elastic3d.rendezvous.settings import Settings
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.replicate import Replicator
from elastic3d.values import Cause, Generation, Node, StoreAt
from elastic3d.values import Slot as Place
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.generations import LATE, UNREACHABLE, Generations
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures
from elastic3d.worker.safety import SafeStep
from tests.clocks import HandClock
from tests.snapshots.test_serving import Place as Memory
from tests.snapshots.test_serving import eventually
from tests.worker.keepers import Nursery, assignment, gone

# Stale safe steps.


def run(safe: SafeStep, steps: range, held: Callable[[int], int], seconds: float) -> list[int]:
    """Make steps of so many seconds; return those after which the safe step was too old."""
    stale = []
    for step in steps:
        safe.stepped(step, held(step), step * seconds)
        if safe.stale(step * seconds):
            stale.append(step)
    return stale


def test_a_safe_step_two_behind_is_current() -> None:
    """It cannot be nearer, however long a step takes and however rare snapshots are."""
    assert run(SafeStep(every=1, start=0, now=0.0), range(1, 100), lambda step: step - 2, 0.1) == []
    assert run(SafeStep(every=1, start=0, now=0.0), range(1, 100), lambda step: step - 2, 300.0) == []
    assert run(SafeStep(every=50, start=0, now=0.0), range(1, 500), lambda step: step // 50 * 50 - 50, 1.0) == []


def test_a_stale_safe_step_is_reported_after_steps_or_seconds() -> None:
    """Whichever comes first of twenty steps and thirty seconds; after a restore it counts from the restored one."""
    assert run(SafeStep(every=1, start=0, now=0.0), range(1, 40), lambda step: min(step, 3), 0.1)[0] == 24
    assert run(SafeStep(every=1, start=0, now=0.0), range(1, 40), lambda step: min(step, 3), 5.0)[0] == 10
    assert run(SafeStep(every=1, start=100, now=0.0), range(101, 140), lambda step: -1, 0.1)[0] == 121
    assert run(SafeStep(every=0, start=0, now=0.0), range(1, 400), lambda step: -1, 9.0) == []


def test_an_unsteady_safe_step_is_reported_once() -> None:
    """It counts as recovered only when it is well within the limits."""
    safe = SafeStep(every=1, start=0, now=0.0)
    safe.stepped(21, -1, 1.0)
    assert str(safe.stale(1.0)) == "no step is safe, 21 steps and 1 s behind step 21"
    safe.stepped(22, 5, 2.0)
    assert safe.stale(2.0)
    safe.stepped(23, 13, 3.0)
    assert not safe.stale(3.0)
    assert safe.newest() == {"step": 23, "safe_step": 13}


# Another buddy.


class Bench:
    """A slot that records the buddies its snapshots go to."""

    index = tile_port = 0
    lender = ""

    def __init__(self) -> None:
        self.buddies: list[str | None] = []

    def set_generation(self, number: int) -> None:
        pass

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        pass

    def set_buddy(self, address: str | None) -> None:
        self.buddies.append(address)

    def prepare(self, assignment: Any) -> int:
        return 1

    def go(self, trainer: int, go: Any) -> None:
        pass

    def stop_all(self) -> None:
        pass


class Scene:
    """The first node of a generation of so many."""

    def __init__(
        self, folder: Path, nodes: int, store: StoreAt | None = None, *, spares: int = 0, **options: Any
    ) -> None:
        self.clock, self.slot, self.figures = HandClock(), Bench(), Figures()
        everybody = tuple(
            Node(name=f"n{i}", incarnation="1", address="host", slots=(Place(tile_port=i),))
            for i in range(nodes + spares)
        )
        self.nodes, self.spares = everybody[:nodes], everybody[nodes:]
        self.file = folder / "n0-0.jsonl"
        self.journal = Journal(str(folder), "run", "n0")
        settings = Settings(
            endpoints="", run_id="run", mode="resident", node="n0", address="127.0.0.1", policy=Policy()
        )
        self.generations = Generations(
            settings,
            RunOptions(store=store, **options),
            [cast(SlotPort, self.slot)],
            lambda event: None,
            journal=self.journal,
            figures=self.figures,
            clock=self.clock,
        )
        self.begin(1)

    def begin(self, number: int) -> None:
        """Enter another generation of the same nodes."""
        generation = Generation(number=number, cause=Cause.START, nodes=self.nodes, spares=self.spares)
        self.generations.prepare(generation, self.nodes[0])
        self.generations.go(generation, self.nodes[0])
        self.generations.heard(w.Restored(slot=0, trainer=1, state=StateRestored(source="none", step=0, generation=0)))

    def fail(self) -> str | None:
        """Let the present buddy take nothing; return the node to which the snapshots go now."""
        address = self.slot.buddies[-1]
        assert address is not None
        unreachable = w.BuddyUnreachable(slot=0, address=address, seconds=5.0, error="refused")
        self.generations.unreachable(unreachable, self.nodes[0])
        return self.slot.buddies[-1]

    def step(self, step: int, safe: int, every: int = 1) -> None:
        """Make a step in a second."""
        self.clock.now += 1.0
        record = StepRecord(
            generation=1,
            step=step,
            loss=1.0,
            gradient_norm=None,
            seconds=1.0,
            safe_step=safe,
            etcd_away_everywhere=False,
            samples=(0, 1),
            sample_sum=0,
            snapshot_every=every,
            snapshot_rank=1,
        )
        self.generations.heard(w.StepFinished(slot=0, trainer=1, record=record))
        self.generations.look_after_snapshots(self.nodes[0])

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name so far."""
        assert self.journal.flush(30)
        return [line for line in map(json.loads, self.file.read_text().splitlines()) if line["event"] == name]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(nodes: int, store: StoreAt | None = None, **options: Any) -> Scene:
        made.append(Scene(tmp_path, nodes, store, **options))
        return made[-1]

    yield make
    for one in made:
        one.journal.close()


def test_a_node_that_is_cut_off_looks_for_no_buddy(scene: Callable[..., Scene]) -> None:
    """Its snapshots stay where they are until it is in a generation again."""
    one = scene(3)
    one.generations.forget()
    assert one.fail() == "host:1"
    assert one.events("buddy.changed") == []
    one.begin(2)
    assert one.fail() == "host:2"


def test_a_spare_is_not_judged_by_what_it_trained(scene: Callable[..., Scene]) -> None:
    """Others make steps in its place: nothing that it holds gets older, and it looks for no buddy."""
    one = scene(3)
    for step in range(1, 31):
        one.step(step, 3)
    one.figures.training("no step for 60 s")
    assert "the safe step is 3" in one.figures.pulse("active", 1, one.clock.now).health
    others = Generation(number=2, cause=Cause.BALANCE, nodes=one.nodes[1:], spares=one.nodes[:1])
    one.generations.sealed(others, one.nodes[0])
    assert one.generations.running is None
    assert one.figures.pulse("spare", 0, one.clock.now).health == "ok"
    assert one.fail() == "host:1"
    one.begin(3)
    assert one.generations.running is not None
    assert one.fail() == "host:2"


def test_what_a_former_buddy_holds_is_not_held_by_the_present_one(scene: Callable[..., Scene]) -> None:
    """Its answer was on its way as the snapshots went to another, who may be the only one of both that stays."""
    one = scene(3)
    former = one.slot.buddies[-1]
    present = one.fail()
    assert former != present
    (world,) = one.generations.worlds.values()
    one.generations.held(w.SnapshotHeld(slot=0, generation=1, step=9, buddy=former))
    assert world.held == {}
    one.generations.held(w.SnapshotHeld(slot=0, generation=1, step=8, buddy=present))
    assert world.held == {0: 8}
    one.generations.keep_with(None)
    one.generations.held(w.SnapshotHeld(slot=0, generation=1, step=9, buddy=present))
    assert world.held == {}
    one.generations.held(w.SnapshotHeld(slot=0, generation=1, step=9))
    assert world.held == {0: 9}


def test_an_unreachable_buddy_is_replaced(scene: Callable[..., Scene]) -> None:
    """In the next generation too; after a while the best one is tried again."""
    one = scene(4)
    assert one.slot.buddies == ["host:1"]
    assert one.fail() == "host:2"
    assert one.fail() == "host:3"
    # A report about a former buddy is too late.
    late = w.BuddyUnreachable(slot=0, address="host:1", seconds=5.0, error="refused")
    one.generations.unreachable(late, one.nodes[0])
    assert one.slot.buddies[-1] == "host:3"
    one.begin(2)
    assert one.slot.buddies[-1] == "host:3"
    one.clock.now += UNREACHABLE
    one.begin(3)
    assert one.slot.buddies[-1] == "host:1"
    assert [(e["buddy"], e["former"]) for e in one.events("buddy.changed")] == [("n2", "n1"), ("n3", "n2")]


def test_without_a_store_the_only_buddy_is_retried_for_ever(scene: Callable[..., Scene]) -> None:
    """Its copy of an older step is all that would survive a death."""
    one = scene(2)
    assert one.fail() == "host:1"
    assert one.events("buddy.changed") == []


def test_a_node_that_trains_alone_has_its_snapshots_copied_to_a_spare(scene: Callable[..., Scene]) -> None:
    """One that takes none is left for another; where none does they stay at home, as without any, for a while."""
    one = scene(1, spares=2)
    assert one.slot.buddies == ["host:1"]
    assert one.fail() == "host:2"
    assert one.fail() is None
    one.step(1, 1)
    assert one.slot.buddies[-1] is None
    one.clock.now += UNREACHABLE
    one.step(2, 2)
    assert one.slot.buddies[-1] == "host:1"


def test_a_spare_that_comes_later_has_the_snapshots_of_a_node_alone_copied_to_it(scene: Callable[..., Scene]) -> None:
    """Unless it is let in before long, or goes again."""
    one = scene(1)
    late, other = (replace(one.nodes[0], name=name, slots=(Place(tile_port=7),)) for name in ("late", "other"))
    one.generations.joined(late)
    one.generations.members([one.nodes[0], late, other])
    one.step(1, 1)
    assert one.slot.buddies == [None]
    one.generations.gone(other.id)
    one.clock.now += LATE
    one.step(2, 2)
    assert one.slot.buddies == [None, "host:7"]
    (changed,) = one.events("buddy.changed")
    assert (changed["buddy"], changed["detail"]) == ("late", "a spare has come")
    one.generations.gone(late.id)
    assert one.fail() is None


def test_a_node_that_leaves_holds_nothing_for_the_one_that_stays(scene: Callable[..., Scene]) -> None:
    """It is a member for a moment after the seal, though its record does not have it: what it took would be lost."""
    one = scene(2)
    one.generations.members(one.nodes)
    one.clock.now += LATE
    leaver, one.nodes = one.nodes[1], one.nodes[:1]
    one.begin(2)
    assert one.slot.buddies == ["host:1", None]
    one.step(1, 1)
    one.generations.gone(leaver.id)
    one.clock.now += LATE
    one.step(2, 2)
    assert one.slot.buddies == ["host:1", None]


def test_spares_hold_nothing_for_nodes_that_have_each_other(scene: Callable[..., Scene]) -> None:
    """Nor does one whose slots are others, or no spare at all."""
    assert scene(2, spares=1).slot.buddies == ["host:1"]
    one = scene(1, spares=1)
    one.spares = (replace(one.spares[0], slots=one.spares[0].slots * 2),)
    one.begin(2)
    assert one.slot.buddies[-1] is None
    one.step(1, 1)
    assert scene(1).slot.buddies == [None]


def test_with_a_store_checkpoints_go_on_without_a_buddy(scene: Callable[..., Scene]) -> None:
    """They are made of snapshots, which would stop with the safe step; other buddies are tried again later."""
    one = scene(3, StoreAt(url="/store"))
    assert one.fail() == "host:2"
    assert one.fail() is None
    one.step(1, 1)
    assert one.slot.buddies[-1] is None
    one.clock.now += UNREACHABLE
    one.step(2, 2)
    assert one.slot.buddies[-1] == "host:1"
    assert [e["buddy"] for e in one.events("buddy.changed")] == ["n2", None, "n1"]


@pytest.mark.parametrize(("options", "step"), [({"stale_snapshots": 8}, 9), ({"stale_after": 6.0}, 7), ({}, 21)])
def test_the_limits_of_a_stale_safe_step_can_be_set(
    scene: Callable[..., Scene], options: dict[str, Any], step: int
) -> None:
    """In snapshots, or in seconds; a step takes one here."""
    one = scene(2, **options)
    for number in range(1, 23):
        one.step(number, -1)
    assert [e["step"] for e in one.events("snapshot.stale")] == [step]


def test_a_changed_interval_is_told_once_with_what_a_death_may_cost(scene: Callable[..., Scene]) -> None:
    """A safe step is too old by the interval in force; the pulse has it for status."""
    one = scene(2)
    for step, every in enumerate((1, 1, 10, 10, 10, 2), start=1):
        one.step(step, -1, every)
    told_of = one.events("snapshot.interval")
    assert [(e["step"], e["former"], e["every"], e["at_risk"], e["costliest"]) for e in told_of] == [
        (3, 1, 10, 16, 1),
        (6, 10, 2, 4, 1),
    ]
    assert one.figures.pulse("active", 1, one.clock.now).snapshot_every == 2
    for step in range(7, 60):
        one.step(step, -1, 10)
    assert [e["step"] for e in one.events("snapshot.stale")] == [41]


def test_a_stale_safe_step_is_reported_and_gets_another_buddy(scene: Callable[..., Scene]) -> None:
    """Once, in the event file and in the node's health; and once more when it has recovered."""
    one = scene(3)
    for step in range(1, 61):
        one.step(step, min(step, 3))
    (stale,) = one.events("snapshot.stale")
    assert (stale["step"], stale["safe_step"], stale["slots"]) == (24, 3, [0])
    health = one.figures.pulse("active", 1, one.clock.now).health
    assert health == "the safe step is 3, 57 steps and 57 s behind step 60"
    assert one.slot.buddies == ["host:1"]
    # Large snapshots take time: the next one has twice as long.
    for step in range(61, 160):
        one.step(step, 3)
    assert one.slot.buddies == ["host:1", "host:2"]
    assert one.events("snapshot.fresh") == []
    for step in range(160, 170):
        one.step(step, step - 1)
    (fresh,) = one.events("snapshot.fresh")
    assert (fresh["step"], fresh["safe_step"]) == (160, 159)
    assert one.figures.pulse("active", 1, one.clock.now).health == "ok"


def test_a_replicator_reports_a_buddy_that_takes_nothing(refusing_port: Callable[[], int]) -> None:
    """Repeatedly, until it is given another; the pending snapshot goes there."""
    home, buddy = Memory(0), Memory(1)
    reports: queue.SimpleQueue[tuple[str, float, str]] = queue.SimpleQueue()
    home.replicator.close()
    home.memory = type(home.memory)()
    home.server.close()
    replicator = Replicator(
        home.memory,
        digested=home.digested.append,
        ended=lambda mark, newer, *_: newer and home.held.append(mark),
        unreachable=lambda *args: reports.put(args),
        patience=0.2,
    )
    try:
        address = f"127.0.0.1:{refusing_port()}"
        replicator.set_credentials(home.credentials)
        home.begin(1)
        buddy.begin(1)
        replicator.set_buddy(address)
        home.write(Mark(1, 3))
        for _ in range(2):
            where, seconds, error = reports.get(timeout=30)
            assert (where, "refused" in error) == (address, True)
            assert seconds >= 0.2
        assert home.held == []
        replicator.set_buddy(buddy.address)
        assert eventually(lambda: home.held == [Mark(1, 3)], 30)
    finally:
        replicator.close()
        buddy.close()


# Companions.


def test_a_stopped_companion_is_killed_and_lost(nursery: Nursery) -> None:
    """It would hold up everybody's safe step: like a silent neighbour it is removed, with its trainers."""
    keeper = nursery.keeper("idle")
    keeper.slot.prepare(assignment())
    pid = keeper.wait(w.Started).pid
    keeper.wait(w.TrainerReady)
    os.kill(keeper.pid, signal.SIGSTOP)
    keeper.slot._silence = 1.0
    lost = keeper.wait(w.SlotLost, seconds=60)
    assert "has not answered" in lost.detail
    assert eventually(lambda: gone(keeper.pid) and gone(pid), 30)


def test_a_companion_that_answers_is_left_alone(nursery: Nursery) -> None:
    """Its answers are no events: they wake nobody."""
    keeper = nursery.keeper("idle")
    keeper.slot.prepare(assignment())
    keeper.wait(w.TrainerReady)
    first = keeper.slot._heard_at
    assert eventually(lambda: keeper.slot._heard_at > first, 30)
    assert keeper.events.empty()
