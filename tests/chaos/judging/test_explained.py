"""Only that ends which the faults that were made may end: nodes, generations, and steps that are made again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.faults.catalogue import KINDS
from chaos.faults.clock import ClockJump
from chaos.faults.etcd import EtcdPause, Revoke
from chaos.faults.fault import Ends, Fault
from chaos.faults.frozen import FreezeAgent, FreezeTemplate
from chaos.faults.moment import When
from chaos.faults.network import Delay
from chaos.faults.process import Crowd, Kill, KillTrainer, Pause
from chaos.history.follow import Event
from chaos.judging.explained import promises
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from tests.chaos.made_up_events import a_death_and_a_join, event, outcome_of, restored, sealed, step

WHEN = When(step=1)
AT = 11.9
NODES, GENERATIONS, STEPS = range(3)


def kill(node: str) -> Fault:
    return Kill(node=node, when=WHEN)


def outcome(events: list[Event], *made: tuple[Fault, str]) -> Outcome:
    """Return a job to which faults were made at 11.9 s, each to a node or to "" for none."""
    ordered = sorted(events, key=lambda one: one.at)
    return outcome_of(ordered, made, AT, steps=6)


def quiet(generations: int = 1) -> Outcome:
    last = [step(6, 6.0, generations)]
    return outcome([sealed(1, 0.0, "start", ["node0", "node1"]), *(step(n, float(n), 1) for n in range(1, 6)), *last])


def judged(seen: Outcome, *, all_known: bool = True, undisturbed: Outcome | None = None) -> list[Promise]:
    return list(promises(seen, undisturbed or quiet(), all_known=all_known))


def test_a_death_that_was_made_is_no_false_one() -> None:
    """Whoever was killed may be reported, and be left out."""
    assert [one.held for one in judged(outcome(a_death_and_a_join(), (kill("node1"), "node1")))] == [True, True, True]


@pytest.mark.parametrize(
    "made",
    [
        (kill("node2"), "node2"),
        (Revoke(node="node1", when=WHEN), "node1"),
        (ClockJump(node="node1", when=WHEN), "node1"),
        (KillTrainer(node="node1", when=WHEN), "node1"),
        (EtcdPause(when=WHEN), ""),
        (FreezeAgent(node="node1", when=WHEN), "node1"),
        (FreezeTemplate(node="node1", when=WHEN), "node1"),
    ],
    ids=str,
)
def test_a_living_node_that_is_taken_for_dead_is_a_broken_promise(made: tuple[Fault, str]) -> None:
    """Nothing was done to it, or nothing that ends a node: by what it is reported, and by the generation without it."""
    broken = judged(outcome(a_death_and_a_join(), made))[NODES].broken
    assert broken == (
        "node0 wrote peer.lost of node1, to which nothing was done that may end it: refused",
        "node1 was left out, to which nothing was done that may end it",
    )


def test_who_is_left_out_as_dead_without_a_report_is_seen() -> None:
    """The generation alone tells; one for another cause takes nobody for dead."""
    events = [one for one in a_death_and_a_join() if one.name != "peer.lost"]
    assert len(judged(outcome(events))[NODES].broken) == 1
    drained = [
        replace(one, fields={**one.fields, "cause": "drain"}) if one.fields.get("number") == 2 else one
        for one in events
    ]
    assert judged(outcome(drained))[NODES].held


@pytest.mark.parametrize(
    "made",
    [
        (Pause(node="node1", when=WHEN), "node1"),
        (Pause(node="node0", when=WHEN), "node0"),
        (Delay(node="node2", when=WHEN), "node2"),
        (Crowd(when=WHEN), ""),
    ],
    ids=str,
)
def test_what_may_explain_a_death_is_believed(made: tuple[Fault, str]) -> None:
    """A node that stood still may be lost, or miss another; what has to do with all nodes may end any."""
    events = [
        replace(one, node="node0") if one.name in ("peer.lost", "generation.sealed") else one
        for one in a_death_and_a_join()
    ]
    assert judged(outcome(events, made))[NODES].held


def test_a_lease_that_etcd_did_not_keep_explains_a_death_once_trainers_end() -> None:
    """Nobody vetoes then; but whose port refuses a connection has ended by itself."""
    silent = [one for one in a_death_and_a_join() if one.name != "peer.lost"]
    made = ((EtcdPause(when=WHEN), ""), (KillTrainer(node="node2", when=WHEN), "node2"))
    assert judged(outcome(silent, *made))[NODES].held
    assert len(judged(outcome(a_death_and_a_join(), *made))[NODES].broken) == 1


def test_a_node_that_ends_is_not_lost() -> None:
    """At a job's end others may miss it a moment before it says so; in its middle they may not."""
    four = ["node0", "node1", "node2", "node3"]
    begin = [sealed(1, 10.0, "start", four), step(1, 11.0, 1)]
    lost = event("peer.lost", 20.0, node="node0", peer="node1", evidence="refused")
    for ended, held in ((19.0, True), (24.0, True), (30.0, False)):
        assert judged(outcome([*begin, lost, event("job.ended", ended, node="node1")]))[NODES].held is held


def test_nothing_is_judged_where_the_script_may_fail_by_itself() -> None:
    """Nobody knows then what was done."""
    assert [one.held for one in judged(outcome(a_death_and_a_join()), all_known=False)] == [None, None, None]


@pytest.mark.parametrize(
    ("made", "held"),
    [
        ([], False),
        ([(EtcdPause(when=WHEN), "")], False),
        ([(Revoke(node="node1", when=WHEN), "node1")], False),
        ([(EtcdPause(when=WHEN), ""), (KillTrainer(node="node1", when=WHEN), "node1")], True),
        ([(Crowd(when=WHEN), "")], True),
    ],
    ids=str,
)
def test_a_generation_ends_only_for_what_may_end_it(made: list[tuple[Fault, str]], held: bool) -> None:
    """Training goes on through an outage of etcd or a revoked lease."""
    four = ["node0", "node1", "node2", "node3"]
    events = [sealed(1, 10.0, "start", four), step(1, 11.0, 1), sealed(2, 12.0, "failure", four), step(2, 13.0, 2)]
    assert judged(outcome(events, *made))[GENERATIONS].held is held
    assert judged(outcome(events, *made), undisturbed=quiet(2))[GENERATIONS].held is None


def test_what_comes_later_explains_nothing() -> None:
    """A fault is no reason for what was sealed before it."""
    four = ["node0", "node1", "node2", "node3"]
    events = [sealed(1, 10.0, "start", four), sealed(2, 11.0, "failure", four), step(1, 13.0, 2)]
    (broken,) = judged(outcome(events, (KillTrainer(node="node1", when=WHEN), "node1")))[GENERATIONS].broken
    assert broken == "generation 2 (failure) was sealed after nothing"


@pytest.mark.parametrize(("first", "held"), [(4, True), (3, True), (2, False)])
def test_only_steps_since_the_newest_snapshot_are_made_again(first: int, held: bool) -> None:
    """After step 3 that of step 2 was safe: a generation goes on with step 3 at the least."""
    two = ["node0", "node1"]
    before = [sealed(1, 10.0, "start", two), *(step(n, 11.0 + n / 10, 1) for n in (1, 2, 3))]
    after = [sealed(2, 12.0, "failure", two), restored(2, 12.5, "memory", first - 1), step(first, 13.0, 2)]
    trainer = (KillTrainer(node="node1", when=WHEN), "node1")
    assert judged(outcome([*before, *after], trainer))[STEPS].held is held
    seen = outcome([*before, *after], trainer, trainer)
    assert judged(seen)[STEPS].held is None, "two may lose both copies"
    (one, at), (other, _) = seen.made
    assert judged(replace(seen, made=((one, at), (other, 12.4))))[STEPS].held is None, "while its state is read, too"
    assert judged(replace(seen, made=((one, at), (other, 12.6))))[STEPS].held is held


def test_the_catalogue_says_of_every_kind_what_may_end_by_it() -> None:
    """Where training goes on no node is lost and no step made again; who loses a node may end one."""
    for word, kind in KINDS.items():
        about = kind.ABOUT
        assert about.ends is Ends.NODE or -1 not in kind.CHANGES, word
        assert about.ends is not Ends.NOTHING or not (about.again or about.spreads), word
