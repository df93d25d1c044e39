"""Times are judged where somebody sets bars, by what the job still made."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from chaos.faults.fault import Fault
from chaos.history.follow import picture
from chaos.judging.bars import Bars, promises
from chaos.judging.notices import notices
from chaos.judging.oracle import judge
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting
from chaos.schedules.scenario import parse_kill
from elastic3d.errors import UsageError
from tests.chaos.made_up_events import BATCH, event, sealed, step

KILL: Fault = parse_kill("1@3")
BAR = KILL.ABOUT.bar


def outcome(*, noticed: float | None, next_step: float | None, over: float = 100.0) -> Outcome:
    """Return a job whose node1 is killed at 10 s: when that is noticed, and the next step, both from then on."""
    events = [sealed(1, 0.0, "start", ["node0", "node1"]), step(1, 9.0, 1)]
    events += (
        []
        if noticed is None
        else [event(KILL.ABOUT.detector, 10.0 + noticed, peer="node1", evidence="its lease ended")]
    )
    events += [] if next_step is None else [step(2, 10.0 + next_step, 1)]
    events.append(event("job.ended", over))
    return Outcome(
        setting=Setting(steps=2, global_batch=BATCH),
        faults=(KILL,),
        picture=picture(events),
        digest="abc",
        exit_codes={},
        killed=("node1",),
        undone=(),
        leftovers=(),
        made=((KILL, 10.0),),
        hit=("node1",),
        events=tuple(events),
    )


def judged(made: Outcome, **asked: float) -> list[Promise]:
    return list(promises(made, tuple(notices(made, made.events)), Bars(**asked)))


def test_nothing_is_judged_without_bars() -> None:
    """Times are told, whatever they are."""
    assert judged(outcome(noticed=None, next_step=None)) == []


@pytest.mark.parametrize(("noticed", "factor", "held"), [(0.9, 1.0, True), (1.1, 1.0, False), (1.1, 2.0, True)])
def test_a_fault_has_to_be_noticed_within_its_bar(noticed: float, factor: float, held: bool) -> None:
    """Times the factor that somebody sets for a machine as slow as theirs. noticed: as a part of the bar."""
    (promise,) = judged(outcome(noticed=noticed * BAR, next_step=1.0), noticed=factor)
    assert promise.held is held


def test_a_fault_that_nobody_notices_breaks_the_bar_unless_the_job_was_over() -> None:
    """In less than the bar nobody had to."""
    (never,) = judged(outcome(noticed=None, next_step=1.0), noticed=1.0)
    assert never.broken == (f"{KILL}: no {KILL.ABOUT.detector} within {BAR:g} s, nor later",)
    (over,) = judged(outcome(noticed=None, next_step=1.0, over=10.0 + BAR / 2), noticed=1.0)
    assert over.held is None


@pytest.mark.parametrize(("next_step", "held"), [(2.9, True), (3.1, False), (None, False)])
def test_the_next_step_has_to_follow_within_the_seconds_asked_for(next_step: float | None, held: bool) -> None:
    """A job that makes none is as late as can be."""
    (promise,) = judged(outcome(noticed=0.1, next_step=next_step), recovered=3.0)
    assert promise.held is held


def test_no_step_is_asked_of_a_job_that_is_over() -> None:
    """What happens after the last step cannot be followed by one."""
    (promise,) = judged(outcome(noticed=0.1, next_step=None, over=11.0), recovered=3.0)
    assert promise.held is None


def test_a_late_recovery_is_a_broken_promise_of_the_run() -> None:
    """It counts beside all others."""
    made = outcome(noticed=0.1, next_step=9.0)
    verdict = judge(made)
    late = verdict.with_promises(judged(made, recovered=3.0))
    assert {*late.broken} - {*verdict.broken} == {f"{KILL}: the next step came after 9.0 s, asked for are 3 s"}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bars_are_positive_numbers(value: float) -> None:
    """Anything else is refused by the name of its option."""
    with pytest.raises(UsageError, match="--bars"):
        Bars(noticed=value)
    with pytest.raises(UsageError, match="--recovery"):
        replace(Bars(), recovered=value)


def test_a_step_that_was_under_way_is_none_that_follows_a_fault() -> None:
    """Where a generation is formed for it, the first of that one is."""
    made = outcome(noticed=0.5, next_step=0.02)
    late = (*made.events[:-1], sealed(2, 11.0, "death", ["node0"]), step(3, 70.0, 2), made.events[-1])
    (promise,) = judged(replace(made, events=late), recovered=30.0)
    assert promise.broken == (f"{KILL}: the next step came after 60.0 s, asked for are 30 s",)
    (promise,) = judged(made, recovered=30.0)
    assert promise.held
