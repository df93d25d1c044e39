"""Schedules that contradict themselves, or cannot happen to a job, are refused before anything starts."""

from __future__ import annotations

import math
import tomllib

import pytest

from chaos.faults.clock import ClockJump
from chaos.faults.code import RaisedByNewcomer, RaisedEverywhere, RaisedForGood, RaisedOnNode
from chaos.faults.data import Spike
from chaos.faults.etcd import EtcdCertificate, EtcdEmpty, EtcdMemberPause, EtcdPassword, EtcdPause, EtcdRestart, Revoke
from chaos.faults.events import EventsFull, EventsGone, EventsHang, OfEvents
from chaos.faults.fault import Fault, OfNode, resolve
from chaos.faults.frozen import FreezeKeeper, FreezeTemplate
from chaos.faults.memory import AllSnapshotFlips, Squeeze
from chaos.faults.moment import Phase, When
from chaos.faults.network import Cut, Narrow, OneWay, Refuse, Reset
from chaos.faults.orders import Announce, Drain, Join
from chaos.faults.process import (
    Continue,
    Crowd,
    Freeze,
    Kill,
    KillBelow,
    KillCompanion,
    KillTrainer,
    Pause,
    Slow,
    Stop,
)
from chaos.faults.store import StoreBusy, StoreGone
from chaos.faults.store_disk import StoreDiskFull, StoreReadOnly
from chaos.history.follow import Picture, picture
from chaos.schedules.draw import ORDINARY, draw_schedule
from chaos.schedules.files import parse, to_toml
from chaos.schedules.schedule import Schedule, bounds, check
from chaos.schedules.sure import check_sure
from elastic3d.errors import UsageError
from tests.chaos.made_up_events import sealed

A, B = When(step=5), When(step=9)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Kill(node="node1", when=When())], "it has no moment"),
        ([Kill(node="node1", when=When(step=60))], "the step must be from 1 to 59"),
        ([Kill(node="node1", when=When(step=-1))], "from 1 up"),
        ([Kill(node="node1", when=When(step=3, phase=Phase.STARTED))], "a phase is one of a generation"),
        ([Kill(node="node1", when=When(step=3, count=2))], "a count is of an event"),
        ([Kill(node="node1", when=When(event="peer.lots"))], r"no event 'peer.lots'; did you mean 'peer.lost'\?"),
        ([Kill(node="node1", when=When(generation=2))], "generation 2 never comes"),
        ([Kill(node="nodes1", when=A)], "'nodes1' is no node"),
        ([Kill(node="node01", when=A)], "'node01' is no node"),
        ([Kill(node="node\N{ARABIC-INDIC DIGIT ONE}", when=A)], "is no node"),
        ([Kill(node="rank00", when=A)], "'rank00' is no node"),
        ([Kill(node="newest", when=A)], "nobody joins, so nobody is the newest; give a join as well"),
        ([Kill(node="newest", when=B), Kill(node="node1", when=A)], "nobody joins, so nobody is the newest"),
        ([Announce(node="newest", when=B), Join(when=A)], "name the node by its number; who is newest may change"),
        ([Kill(node=f"node1{'0' * 5000}", when=A)], "is no node"),
        ([Freeze(node="node1", slot=-1, when=A)], "slot=-1 is none that it happens to; give 0 or more"),
        ([KillCompanion(node="node1", slot=0, when=A)], "slot=0 is none that it happens to; give 1 or more"),
        ([Join(when=When(event="peer.lost"))], "its moment never comes, since nothing else"),
        ([Join(when=When(event="etcd.lost")), Kill(node="node1", when=When(generation=2))], "its moment never comes"),
        ([Join(when=When(event="fault.ordered"))], "fault.ordered is of `elastic3d chaos inject`, and never comes"),
        ([Crowd(processes=1_000_000, when=A)], "processes= is from 1 to 64, for each processor"),
        ([Crowd(seconds=math.inf, when=A)], "a day"),
        ([Pause(node="node1", seconds=math.inf, when=A)], "a day"),
        ([EtcdPause(seconds=math.inf, when=A)], "a day"),
        ([Drain(node="node1", seconds=math.inf, when=A)], "a day"),
        ([Squeeze(node="node1", room=math.inf, when=A)], "a TiB"),
        ([Squeeze(node="node1", room=1e300, when=A)], "a TiB"),
        ([Narrow(node="node1", megabits=1e300, when=A)], "100000 at most"),
        ([Kill(node="node4", when=A)], "no such node; the job has node0 to node3"),
        ([Kill(node="rank4", when=A)], "no such rank; the job has ranks 0 to 3"),
        ([KillTrainer(node="node1", slot=1, when=A)], "there is no slot 1; nodes have 1"),
        ([Kill(node="node1", when=A), Stop(node="node1", when=B)], "only once"),
        ([Kill(node="node1", when=A), Pause(node="node1", when=B)], "node1 is gone by then, after kill node1@5"),
        ([Continue(node="node1", when=A)], "node1 is not stopped"),
        ([Stop(node="node1", when=B), Continue(node="node1", when=A)], "it must come after"),
        ([Stop(node="node1", when=A), Revoke(node="node1", when=B)], "gone by then"),
        ([Join(when=B), Kill(node="node4", when=A)], "node4 has not come by then"),
        ([Kill(node="leader", when=A), Kill(node="leader", when=A)], "it is there twice"),
        ([EtcdPause(when=A), EtcdRestart(when=A)], "etcd is away already"),
        ([EtcdEmpty(when=A), EtcdMemberPause(when=B)], "one is of an etcd of one member"),
        ([EtcdPassword(when=A), EtcdEmpty(when=B)], "whose data are replaced has another password"),
        ([ClockJump(when=A, node="node0"), EtcdCertificate(when=B)], "a new certificate is not valid yet, or over"),
        ([EtcdMemberPause(members=3, when=A)], "members must be 1"),
        ([OneWay(node="node1", when=A, seconds=0)], "more than 0 s"),
        ([StoreGone(when=A), StoreDiskFull(when=B)], "a folder that is gone can be nothing else"),
        ([StoreReadOnly(when=A), StoreBusy(when=B)], "one is of a store in a folder"),
        ([Spike(when=A)], "give a step from 40"),
        ([FreezeTemplate(node="node1", slot=1, when=A)], "there is no slot 1"),
        ([FreezeKeeper(node="node1", when=A), Kill(node="node1", when=B)], "only once"),
        ([EventsFull(when=A, seconds=0.0)], "more than 0 s"),
        ([Pause(node="node1", seconds=0.0, when=A)], "more than 0 s"),
        ([Slow(node="node1", share=1.5, when=A)], "between 0 and 1"),
        ([Kill(node=f"node{n}", when=A) for n in range(4)], "leave at least one"),
        (
            [RaisedForGood(when=A), Kill(node="node1", when=B)],
            "kill node1@9: its moment never comes, since the job ends",
        ),
        ([KillBelow(when=A), RaisedEverywhere(when=B)], "its moment never comes, since the job ends by kill-below"),
        ([KillBelow(when=A), RaisedEverywhere(when=A)], "the job ends by the one or by the other"),
        ([KillBelow(when=B), Join(when=When(event="peer.lost"))], "a node that comes then may be enough"),
        ([KillBelow(when=B), *(Kill(node=f"node{n}", when=A) for n in range(3))], "at least 2 must be"),
        ([KillBelow(when=A, timeout=0)], "more than 0 s"),
        ([RaisedByNewcomer(when=A)], "its moment never comes, since no node does; give a join as well"),
        ([RaisedByNewcomer(when=B), Join(when=A)], "its moment never comes, since all who join do so before"),
        ([RaisedByNewcomer(when=When(event="peer.lost"))], "its moment is a step alone"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(str(fault) for fault in value),
)
def test_what_can_never_happen_is_refused(faults: list[Fault], message: str) -> None:
    """To a job of four nodes with a slot each and sixty steps."""
    with pytest.raises(UsageError, match=message):
        check(faults, nodes=4, steps=60)


@pytest.mark.parametrize("kind", [OneWay, Refuse, Reset])
def test_what_is_between_two_nodes_needs_a_second_one(kind: type[OfNode]) -> None:
    """Of those that the job begins with, or that join."""
    fault = kind(node="node0", when=B)
    with pytest.raises(UsageError, match="it takes 2 nodes or more, and the job has 1"):
        check([fault], nodes=1, steps=60)
    check([fault, Join(when=A)], nodes=1, steps=60)


@pytest.mark.parametrize("kind", [EventsFull, EventsHang, EventsGone])
def test_what_befalls_events_needs_a_node_that_neither_leads_nor_is_first(kind: type[OfEvents]) -> None:
    """Of two nodes one may lead and the other have rank 0; a drawn one has such a node whatever the layout leaves."""
    fault = kind(when=B)
    with pytest.raises(UsageError, match="it takes 3 nodes or more, and the job has 2"):
        check([fault], nodes=2, steps=60)
    check([fault, Join(when=A)], nodes=2, steps=60)
    with pytest.raises(UsageError, match="of the 3 nodes left there may be none that neither leads nor is first"):
        check_sure([fault, Kill(node="node3", when=A)], nodes=4)
    check_sure([fault], nodes=4)


def test_a_second_slot_is_needed_or_the_fault_is_skipped() -> None:
    """Nodes of two slots have no slot 2; where nodes have one, what needs a second is skipped by name, not refused."""
    companion = KillCompanion(node="node1", slot=2, when=A)
    with pytest.raises(UsageError, match="there is no slot 2; nodes have 2"):
        check([companion], nodes=4, slots=2)
    check([companion], nodes=4, slots=3)
    check([KillCompanion(node="node1", when=A)], nodes=4)


@pytest.mark.parametrize(
    "faults",
    [
        [Kill(node="node1", when=A), Kill(node="node2", when=When(generation=2, phase=Phase.STARTED))],
        [Stop(node="node1", when=A), Continue(node="node1", when=B), Revoke(node="node1", when=When(step=12))],
        [Join(when=A), Kill(node="node4", when=B)],
        [Join(when=A), Join(when=A), Join(when=A)],
        [Kill(node="node1", when=When(event="checkpoint.committed", count=3))],
        [Kill(node="node1", when=When(event="rank.stuck"))],
        [Stop(node="node1", when=A), Join(when=When(event="peer.lost"))],
        [Cut(node="node1", when=A), Announce(node="node2", when=B), StoreBusy(when=A)],
        [EtcdPause(when=A), EtcdRestart(when=B)],
        [Pause(node="node1", when=A), Kill(node="node1", when=B)],
        [AllSnapshotFlips(when=A), Kill(node="node1", when=B)],
        [Kill(node="node1", when=A), RaisedEverywhere(when=B)],
        [Join(when=A), Kill(node="node1", when=A), KillBelow(when=B)],
        [RaisedByNewcomer(when=A), Join(when=B)],
        [RaisedOnNode(rank=1, when=A), Kill(node="node2", when=B)],
    ],
    ids=lambda faults: "-".join(str(fault) for fault in faults),
)
def test_what_can_happen_is_not(faults: list[Fault]) -> None:
    """Also where the steps of a job are not known."""
    check(faults, nodes=4, steps=60)
    check(faults, nodes=4)


def test_drawn_schedules_can_happen_and_are_those_of_their_seed() -> None:
    """Of all that can happen to any script, whatever the size of the job."""
    words = set()
    for seed in range(200):
        nodes, slots = 2 + seed % 4, 1 + seed % 2
        schedule = draw_schedule(seed, nodes=nodes, steps=40, faults=1 + seed % 5, slots=slots, saved=5)
        assert schedule == draw_schedule(seed, nodes=nodes, steps=40, faults=1 + seed % 5, slots=slots, saved=5)
        assert (len(schedule.faults), schedule.seed) == (1 + seed % 5, seed)
        check(schedule.faults, nodes=nodes, steps=40, slots=slots)
        assert bounds(schedule.faults, nodes)[0] >= 1
        words |= {fault.WORD for fault in schedule.faults}
    assert words == set(ORDINARY)


def test_a_job_that_is_to_have_too_few_nodes_says_so_on_its_command_line() -> None:
    """It asks for two at the least, whatever else is lost before."""
    few = KillBelow(when=B)
    assert bounds([few], 4) == (2, 4)
    assert bounds([Kill(node="node1", when=A), few], 3) == (2, 3)
    assert bounds([Kill(node="node1", when=A)], 2) == (1, 2)
    assert few.conf() == {"timeout": "30"}


def test_more_losses_than_nodes_are_not_drawn() -> None:
    """The number that can happen is named."""
    with pytest.raises(UsageError, match="3 faults cannot happen to 3 nodes in 40 steps; ask for 2"):
        draw_schedule(1, nodes=3, steps=40, faults=3, words=["kill"], saved=5)


def test_who_joined_last_is_the_newest() -> None:
    """Nobody before anybody has joined; a node that was lost and came back as much as a fresh one, and a spare too."""
    four = ["node0", "node1", "node2", "node3"]
    events = [sealed(1, 1.0, "start", four)]
    assert (resolve("newest", Picture()), resolve("newest", picture(events))) == (None, None)
    events.append(sealed(2, 2.0, "death", four[:3]))
    assert resolve("newest", picture(events)) is None
    events.append(sealed(3, 3.0, "join", [*four[:3], "node4"]))
    assert resolve("newest", picture(events)) == "node4"
    events.append(sealed(4, 4.0, "death", four[:3]))
    assert resolve("newest", picture(events)) == "node4", "it is dead, and what waits for one waits for the next"
    events.append(sealed(5, 5.0, "join", ["node3", *four[:2]], spares=("node2",)))
    assert resolve("newest", picture(events)) == "node3"
    events.append(sealed(6, 6.0, "join", ["node3", *four[:2]], spares=("node2", "node5")))
    assert resolve("newest", picture(events)) == "node5"


def test_the_newest_is_named_in_schedules_and_never_drawn() -> None:
    """It is written and read as any other node; draws are what they were."""
    schedule = Schedule(faults=(Join(when=A), Kill(node="newest", when=B)))
    check(schedule.faults, nodes=2, steps=60)
    assert parse(tomllib.loads(to_toml(schedule)), "schedule", nodes=2) == schedule
    check([Cut(node="node1", seconds=5.0, when=A), Pause(node="newest", when=B)], nodes=3, steps=60)
    drawn = [draw_schedule(seed, nodes=4, steps=60, faults=3, words=["join", "kill"]) for seed in range(30)]
    assert "newest" not in {fault.node for one in drawn for fault in one.faults if isinstance(fault, OfNode)}
