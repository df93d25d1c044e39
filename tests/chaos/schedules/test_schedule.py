"""Schedules that contradict themselves, or cannot happen to a job, are refused before anything starts."""

from __future__ import annotations

import pytest

from chaos.faults.clock import ClockJump
from chaos.faults.etcd import EtcdCertificate, EtcdEmpty, EtcdMemberPause, EtcdPassword, EtcdPause, EtcdRestart, Revoke
from chaos.faults.fault import Fault
from chaos.faults.moment import Phase, When
from chaos.faults.network import Cut, OneWay
from chaos.faults.orders import Announce, Join
from chaos.faults.process import Continue, Kill, KillTrainer, Pause, Slow, Stop
from chaos.schedules.draw import ORDINARY, draw_schedule
from chaos.schedules.schedule import bounds, check
from elastic3d.errors import UsageError

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
        ([Cut(node="node1", when=A), Announce(node="node2", when=B)], "hosts of their own do not reach"),
        ([OneWay(node="node1", when=A, seconds=0)], "more than 0 s"),
        ([Pause(node="node1", seconds=0.0, when=A)], "more than 0 s"),
        ([Slow(node="node1", share=1.5, when=A)], "between 0 and 1"),
        ([Kill(node=f"node{n}", when=A) for n in range(4)], "leave at least one"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(str(fault) for fault in value),
)
def test_what_can_never_happen_is_refused(faults: list[Fault], message: str) -> None:
    """To a job of four nodes with a slot each and sixty steps."""
    with pytest.raises(UsageError, match=message):
        check(faults, nodes=4, steps=60)


@pytest.mark.parametrize(
    "faults",
    [
        [Kill(node="node1", when=A), Kill(node="node2", when=When(generation=2, phase=Phase.STARTED))],
        [Stop(node="node1", when=A), Continue(node="node1", when=B), Revoke(node="node1", when=When(step=12))],
        [Join(when=A), Kill(node="node4", when=B)],
        [Join(when=A), Join(when=A), Join(when=A)],
        [Kill(node="node1", when=When(event="checkpoint.committed", count=3))],
        [EtcdPause(when=A), EtcdRestart(when=B)],
        [Pause(node="node1", when=A), Kill(node="node1", when=B)],
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


def test_more_losses_than_nodes_are_not_drawn() -> None:
    """The number that can happen is named."""
    with pytest.raises(UsageError, match="3 faults cannot happen to 3 nodes in 40 steps; ask for 2"):
        draw_schedule(1, nodes=3, steps=40, faults=3, words=["kill"], saved=5)
