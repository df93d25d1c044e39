"""What is asked of a script that torchrun restarts: each promise can be broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.history.follow import Event, Injection, picture
from chaos.judging.restart import AS_OF_EVERY_JOB, COMES, NOTICED, judge_restart
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting
from chaos.schedules.scenario import parse_kill
from tests.chaos.made_up_events import event, sealed

KILL = parse_kill("1@3")
ENDED = 200.0


def outcome(*more: Event, kind: str = "kill", node: str = "node1", last: tuple[str, ...] = ("node0",)) -> Outcome:
    """Return a job of two nodes to one of which something is done at 20 s. last: nodes of its second generation."""
    events = [
        sealed(1, 10.0, "start", ["node0", "node1"]),
        *more,
        sealed(2, 21.0, "death", [*last]),
        event("job.ended", ENDED, kind="done", error=""),
    ]
    return Outcome(
        setting=Setting(conf={"mode": "restart"}),
        faults=(KILL,),
        picture=picture(events),
        digest="abc",
        exit_codes={"node0": 0, "node1": -9},
        killed=("node1",),
        undone=(),
        leftovers=(),
        injections=(Injection(kind=kind, node=node, at=20.0),),
        made=((KILL, 20.0),),
        events=tuple(sorted(events, key=lambda one: one.at)),
    )


def lost(peer: str, at: float) -> Event:
    return event("peer.lost", at, peer=peer, evidence="it refuses")


def test_a_job_that_goes_on_with_who_is_there_keeps_all() -> None:
    """Its steps, losses and checkpoints are its own affair; nothing but its end and its nodes are judged."""
    made = outcome(lost("node1", 20.5))
    verdict = judge_restart(made, replace(made, events=()))
    assert verdict.broken == ()
    assert (verdict.same_bits, all(promise.held for promise in verdict.promises)) == (True, True)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (replace(outcome(), failure="it stands"), AS_OF_EVERY_JOB[0]),
        (replace(outcome(), exit_codes={"node0": 1}), AS_OF_EVERY_JOB[1]),
        (replace(outcome(), undone=(KILL,)), AS_OF_EVERY_JOB[2]),
        (replace(outcome(), leftovers=("process 7",)), AS_OF_EVERY_JOB[3]),
        (outcome(lost("node0", 20.5)), "nobody is put out to whom nothing was done"),
        (outcome(last=("node0", "node1")), "generations have the nodes that are there"),
        (outcome(kind="join", node="node4"), "generations have the nodes that are there"),
        (replace(outcome(), digest="abd"), "the script's result is that of a run that nothing happens to"),
    ],
)
def test_each_promise_is_broken_alone(made: Outcome, says: str) -> None:
    """By what it speaks of, and by nothing else."""
    broken = [promise.says for promise in judge_restart(made, outcome()).promises if promise.broken]
    assert broken == [says]


def test_who_is_done_may_be_missed_before_its_process_ends() -> None:
    """An agent closes its port first; that is no node put out for nothing."""
    done = event("job.ended", 102.0, node="node0", kind="done", error="")
    assert judge_restart(outcome(lost("node0", 101.0), done)).kept
    assert not judge_restart(outcome(lost("node0", 90.0), done)).kept


@pytest.mark.parametrize(("kind", "patience"), [("kill", NOTICED), ("join", COMES)])
def test_a_job_that_ends_soon_after_has_had_no_time(kind: str, patience: float) -> None:
    """Nobody had to form another generation by then."""
    made = outcome(kind=kind, last=("node0", "node1"), node="node1" if kind == "kill" else "node4")
    assert judge_restart(made).broken
    early = replace(made, events=tuple(one for one in made.events if one.at < 20.0 + patience))
    assert not judge_restart(early).broken


def test_a_script_that_tells_no_result_is_not_compared() -> None:
    """Nor is one without an undisturbed run."""
    for quiet in (replace(outcome(), digest=None), None):
        verdict = judge_restart(outcome(), quiet)
        assert (verdict.same_bits, verdict.kept) == (None, True)
