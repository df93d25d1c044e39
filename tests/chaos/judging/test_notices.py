"""A fault is noticed by the event that the catalogue names, of the node that it happened to, or never."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.faults.clock import ClockJump
from chaos.faults.data import Nan
from chaos.faults.etcd import EtcdPause, EtcdRestored
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.network import Cut, HalfOpen, Strange
from chaos.faults.orders import Drain, Join
from chaos.faults.process import Freeze, Kill, KillTrainer, Slow
from chaos.history.follow import Event
from chaos.judging.notices import LONG, notices, promise
from chaos.playing.outcome import Outcome
from tests.chaos.made_up_events import event, outcome_of, sealed, step

WHEN = When(step=1)
FOUR = ["node0", "node1", "node2", "node3"]
AT = 12.0
KILL, HALF, FREEZE, TRAINER = (kind(node="node1", when=WHEN) for kind in (Kill, HalfOpen, Freeze, KillTrainer))
CUT = Cut(node="node1", when=WHEN, seconds=20.0)


STRANGE = Strange(node="node1", when=WHEN)


def refused(node: str) -> Event:
    return event("peer.refused", 13.0, node=node, port="tiles", peer="198.18.0.1", reason="no proof", more=None)


def outcome(*events: Event, made: tuple[tuple[Fault, str], ...], last: float = 100.0) -> Outcome:
    """Return a job to which faults were made at 12 s, with a step at the end."""
    ordered = (sealed(1, 10.0, "start", FOUR), step(1, 11.0, 1), *events, step(2, last, 1))
    return outcome_of(ordered, made, AT, steps=2)


def lost(peer: str) -> Event:
    return event("peer.lost", 13.0, node="node3", peer=peer, evidence="refused")


def exited(kind: str) -> Event:
    return event("trainer.exited", 13.0, node="node1", kind=kind, step=None, error=None)


def stuck(*nodes: str) -> Event:
    return event("rank.stuck", 13.0, node="node3", nodes=list(nodes), detail="")


@pytest.mark.parametrize(
    ("fault", "said", "after"),
    [
        (KILL, lost("node1"), 1.0),
        (KILL, lost("node0"), None),
        (FREEZE, stuck("node0", "node1"), 1.0),
        (FREEZE, stuck("node0"), None),
        (FREEZE, stuck(), 1.0),
        (CUT, sealed(2, 13.0, "death", ["node0", "node2", "node3"]), 1.0),
        (CUT, sealed(2, 13.0, "failure", FOUR), None),
        (CUT, sealed(2, 13.0, "join", ["node0", "node2"], ("node1",)), None),
        (HALF, sealed(2, 13.0, "stuck", FOUR), 1.0),
        (Drain(node="node1", when=WHEN), event("node.draining", 13.0, node="node1", seconds=None, detail=""), 1.0),
        (Drain(node="node1", when=WHEN), event("node.draining", 13.0, node="node2", seconds=None, detail=""), None),
        (Join(when=WHEN), event("member.joined", 13.0, node="node1"), 1.0),
        (STRANGE, refused("node1"), 1.0),
        (STRANGE, refused("node2"), None),
        (EtcdPause(when=WHEN), event("etcd.lost", 13.0, node="node2", error=""), 1.0),
        (Nan(rank=1, when=WHEN), event("batch.excluded", 13.0, node="node3", step=1, samples=[[2, 4]]), 1.0),
        (TRAINER, exited("crash"), 1.0),
        (TRAINER, exited("done"), None),
        (TRAINER, exited("stopped"), None),
        (EtcdRestored(when=WHEN), event("etcd.rolled_back", 13.0, node="node2", revision=7), 1.0),
        (EtcdRestored(when=WHEN), lost("node1"), None),
    ],
    ids=str,
)
def test_only_what_the_detector_says_of_the_same_node_is_a_notice(
    fault: Fault, said: Event, after: float | None
) -> None:
    """Whatever it says of another one; what is of all nodes may be said by any."""
    node = "" if isinstance(fault, EtcdPause | EtcdRestored) else "node1"
    made = outcome(said, made=((fault, node),))
    (notice,) = notices(made, made.events)
    assert notice.after == (None if after is None else pytest.approx(after))
    assert promise(made, all_known=True).held is (after is not None)


def test_a_fault_without_its_event_breaks_the_promise_once_there_was_time() -> None:
    """A step has to be made after it: without one nobody knows how long the machine stood still."""
    made = ((FREEZE, "node1"),)
    (broken,) = promise(outcome(made=made), all_known=True).broken
    assert broken == f"{FREEZE}: no rank.stuck of it in 88 s"
    assert promise(outcome(made=made, last=AT + LONG - 1), all_known=True).held is None
    assert promise(outcome(made=made), all_known=False).held is None


def test_a_death_is_noticed_by_those_who_go_on_without_the_node() -> None:
    """Where it is found by its silence, nobody says that it was lost."""
    without = sealed(2, 13.0, "death", ["node0", "node2", "node3"])
    assert promise(outcome(without, made=((KILL, "node1"),)), all_known=True).held
    drain = Drain(node="node1", when=WHEN)
    assert promise(outcome(without, made=((drain, "node1"),)), all_known=True).held is False, (
        "it has to say that it leaves"
    )


@pytest.mark.parametrize(
    "fault",
    [EtcdPause(when=WHEN, seconds=0.5), Slow(node="node1", when=WHEN), Cut(node="node1", when=WHEN, seconds=8.0)],
    ids=str,
)
def test_what_need_not_be_noticed_everywhere_is_not_judged(fault: Fault) -> None:
    """An outage that is over soon, and a slow node where all share the processors."""
    assert promise(outcome(made=((fault, "node1"),)), all_known=True).held is None


def test_another_fault_may_be_why_one_is_not_noticed() -> None:
    """It ends the trainers that stand still, or the node. A clock of another node does neither."""
    for other, node in ((KILL, "node2"), (EtcdPause(when=WHEN), ""), (ClockJump(node="node1", when=WHEN), "node1")):
        assert promise(outcome(lost("node2"), made=((FREEZE, "node1"), (other, node))), all_known=True).broken == ()
    clock = (ClockJump(node="node2", when=WHEN), "node2")
    assert len(promise(outcome(made=((FREEZE, "node1"), clock)), all_known=True).broken) == 1


@pytest.mark.parametrize("node", ["node1", "node2"])
def test_a_fault_long_before_is_not_why_one_is_not_noticed(node: str) -> None:
    """Unless it took the same node away; it may be just before one, or while it lasts."""
    events = (sealed(1, 10.0, "start", FOUR), step(1, 11.0, 1), step(2, 100.0, 1))
    trainer, etcd = KillTrainer(node=node, when=WHEN), EtcdPause(when=WHEN, seconds=8.0)
    for other, hit in ((KILL, node), (trainer, node), (etcd, "")):
        for late in (10.0, 30.0):
            job = outcome_of(events, ((other, hit), (FREEZE, "node1")), AT, steps=2)
            broken = promise(replace(job, made=((other, AT), (FREEZE, AT + late))), all_known=True).broken
            unseen = f"{FREEZE}: no rank.stuck of it in {88 - late:.0f} s"
            assert (unseen in broken) is (late == 30 and (other is not KILL or node == "node2")), (other, late)
