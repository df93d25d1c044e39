"""A job is left standing where nothing happens in it for as long as it was given, or nothing but talk for longer."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from chaos.history.follow import Event, picture
from chaos.judging.oracle import judge
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting
from chaos.playing.standing import CIRCLES, Standing
from chaos.report.view import summary
from chaos.schedules.scenario import parse_kill
from tests.chaos.made_up_events import BATCH, event, sealed, step
from tests.paths import ROOT

PATIENCE = 30.0
NODES = ("node0", "node1")


def begun() -> list[Event]:
    return [sealed(1, 1.0, "start", [*NODES]), step(1, 2.0, 1)]


def heard(events: list[Event]) -> Standing:
    """Watch a job from time 0 on, which writes each event at its own time."""
    standing = Standing.since(0.0, PATIENCE)
    for one in events:
        standing.hear([one], one.at)
    return standing


def why(events: list[Event], now: float) -> str:
    return heard(events).why(picture(events), NODES, now)


def test_a_job_stands_when_nobody_writes_an_event() -> None:
    """For longer than it was given; who runs on is said, where it stands, and what came last."""
    assert why(begun(), 2.0 + PATIENCE) == ""
    assert why(begun(), 2.1 + PATIENCE) == (
        "no node has written an event for 30 s, and node0, node1 ran on: it stands after step 1, in generation 1 of "
        "node0, node1; the last one is step.committed of node0"
    )
    assert why([], 0.1 + PATIENCE).endswith("it stands after step 0, before its first generation; there was none")


def test_a_job_stands_when_it_goes_in_circles() -> None:
    """Generations that follow each other are no progress, and neither is what nodes say of their trouble."""
    times = [10.0 * number for number in range(1, 20)]
    circles = [
        *begun(),
        *(sealed(number, at, "retry", [*NODES]) for number, at in enumerate(times, 2)),
        event("etcd.lost", 200.0, node="node1", error="no answer"),
    ]
    until = 2.0 + CIRCLES * PATIENCE
    early = [one for one in circles if one.at < until]
    assert why(early, until) == ""
    assert why(circles, 201.0).startswith("nodes write events, but none has made or saved a step for 120 s, and node0")
    for name in ("step.committed", "checkpoint.committed"):
        more = step(2, 150.0, 20) if name == "step.committed" else event(name, 150.0, step=1, moved=True)
        assert why(sorted([*circles, more], key=lambda one: one.at), 201.0) == ""


def test_a_job_that_is_left_standing_is_told_with_the_promise_and_its_page() -> None:
    """What was promised, by which page, and what was seen; nothing is said of what a job that was given up leaves."""
    events = begun()
    stands = why(events, 100.0)
    outcome = Outcome(
        setting=Setting(steps=6, global_batch=BATCH),
        faults=(parse_kill("1@3"),),
        picture=picture(events),
        digest=None,
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
        failure=stands,
    )
    verdict = judge(outcome)
    promise = verdict.promises[0]
    assert (promise.says, promise.broken) == ("the job never stands still for good", (stands,))
    assert (ROOT / "docs" / promise.page).exists()
    assert verdict.told[0] == f"the job never stands still for good (reference/failures.md): {stands}"
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(summary(outcome, verdict))
    assert verdict.told[0] in console.export_text()
    left = next(one for one in verdict.promises if one.says == "nothing is left behind")
    assert left.held is None
    assert judge(replace(outcome, failure="")).promises[0].held


def test_who_ends_early_and_leaves_faults_out_is_told_to_end_early() -> None:
    """A fault whose moment never came is what came of that, and comes after it."""
    outcome = Outcome(
        setting=Setting(steps=6, global_batch=BATCH),
        faults=(parse_kill("1@3"),),
        picture=picture(begun()),
        digest="abc",
        exit_codes={},
        killed=(),
        undone=(parse_kill("1@3"),),
        leftovers=(),
    )
    broken = [promise.says for promise in judge(outcome).promises if promise.broken]
    assert broken[:2] == ["the job makes all its steps", "every fault of the schedule comes to pass"]
