"""Faults one after another in one job: what is drawn from a seed, and whose each verdict is."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

from chaos.history.follow import GenerationView, Picture, Step
from chaos.playing.outcome import Outcome
from chaos.score.card import card
from chaos.score.kinds import KINDS
from chaos.score.playing import setting
from chaos.score.series import APART, FIRST, Series, counts, draw, job, read_series, steps_of, together
from chaos.score.trials import Trial
from chaos.scripts import mark_of
from elastic3d.health.stuck import Fault
from elastic3d.values import Layout

PAIR = Layout(pp=1, dp=2)


def test_a_seed_draws_the_same_jobs() -> None:
    """And another one others; each kind comes as often as asked for."""
    wanted = dict.fromkeys(KINDS, 5)
    jobs = draw(wanted, 3, each=4)
    assert jobs == draw(wanted, 3, each=4)
    assert jobs != draw(wanted, 4, each=4)
    assert Counter(trial.kind for series in jobs for trial in series.trials) == wanted


def test_faults_of_a_job_are_apart_and_controls_come_last() -> None:
    """Each finds a generation that has made steps of its own, and none a gap that a control left behind."""
    jobs = [series for series in draw(dict.fromkeys(KINDS, 7), 1, each=5) if together(series.trials[0].kind)]
    assert max(len(series.trials) for series in jobs) == 5
    for series in jobs:
        at = [trial.step for trial in series.trials]
        assert at[0] == FIRST
        assert all(APART[0] <= later - step <= APART[1] for step, later in pairwise(at))
        assert at[-1] < steps_of(5)
        assert {trial.layout for trial in series.trials} == {series.layout}
        controls = [KINDS[trial.kind].control for trial in series.trials]
        assert controls == sorted(controls)
        assert all(trial.rank < series.layout.world for trial in series.trials)


def test_slow_kinds_are_tried_as_often_as_needed_and_quick_ones_get_the_rest() -> None:
    """More than three hundred faults in all, ten at least of each class."""
    wanted = counts(list(KINDS), 360)
    assert sum(count for kind, count in wanted.items() if not KINDS[kind].control) == 360
    assert all(count >= 10 for count in wanted.values())
    assert all(wanted[kind] == 10 for kind, row in KINDS.items() if row.bar > 10)
    assert all(count == 1 for count in counts(["spin", "loader", "stall"], 2).values())


def test_no_machine_is_kept_out_for_holding_others_up() -> None:
    """A rank that is hit twice in a job stays in it."""
    made = job(Series(trials=(trial("stop", 5), trial("gil", 11))), 20)
    assert made.conf["flaps"] == "0"
    assert {"--fault=stop:1@5:0", "--fault=gil:1@11:0"} <= set(made.options)


def trial(kind: str, step: int, rank: int = 1) -> Trial:
    return Trial(kind=kind, rank=rank, step=step, micro_batch=0, layout=PAIR)


def step(number: int, generation: int, at: float) -> Step:
    samples = (16 * (number - 1), 16 * number)
    return Step(number=number, generation=generation, at=at, loss="0x1", seconds=0.1, samples=samples, sample_sum=0)


def view(number: int, cause: str, nodes: tuple[str, ...], at: float) -> GenerationView:
    return GenerationView(
        number=number,
        cause=cause,
        nodes=nodes,
        spares=(),
        leader=nodes[0],
        layout={},
        detail="",
        sealed_at=at,
        restored_from="memory",
        first_step=1,
        last_step=1,
        steps_repeated=int(cause == "stuck"),
        planned_repeats=0,
        seconds_to_first_step=1.0,
        pause=None,
    )


STEPS = 30
QUIET_STEPS = tuple(step(number, 1, number) for number in range(1, STEPS + 1))


def played(folder: Path, marks: dict[int, float], said: list[tuple[float, int, str, str]], made: int) -> Outcome:
    """Return a job of two generations after the first, and leave its files. said: (at, generation, fault, node)."""
    (folder / "out").mkdir()
    for at_step, at in marks.items():
        (folder / "out" / mark_of(at_step)).write_text(json.dumps({"at": at}))
    (folder / "events").mkdir()
    lines = [
        {"event": "rank.stuck", "at": at, "generation": number, "fault": fault, "nodes": [node], "act": True}
        for at, number, fault, node in said
    ]
    (folder / "events" / "node0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generations = (
        view(1, "start", ("node0", "node1"), 0.0),
        view(2, "stuck", ("node1", "node0"), 14.5),
        view(3, "stuck", ("node0", "node1"), 25.0),
    )
    return Outcome(
        setting=setting(None, PAIR, STEPS),
        faults=(),
        picture=Picture(generations=generations, steps=QUIET_STEPS[:made]),
        digest="d" if made == STEPS else None,
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
        failure="" if made == STEPS else "nothing happened",
    )


def calm() -> Outcome:
    return Outcome(
        setting=setting(None, PAIR, STEPS),
        faults=(),
        picture=Picture(steps=QUIET_STEPS),
        digest="d",
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
    )


def test_a_verdict_belongs_to_the_fault_before_it(tmp_path: Path) -> None:
    """The node is the one that had the rank when it failed: the second generation has them the other way round."""
    series = Series(trials=(trial("stop", 5), trial("gil", 11), trial("stall", 17)))
    said = [(14.0, 1, Fault.STOPPED, "node1"), (24.0, 2, Fault.HELD, "node0")]
    outcome = played(tmp_path, {5: 10.0, 11: 20.0, 17: 26.0}, said, STEPS)
    results, missed = read_series(series, outcome, calm(), tmp_path)
    assert not missed
    assert [result.named for result in results] == [True, True, False]
    assert [result.first.after for result in results if result.first] == [4.0, 4.0]
    assert [result.steps_lost for result in results] == [1, 1, 0]
    assert all(row.passed for row in card(results))


def test_who_is_named_while_nothing_happens_costs_precision(tmp_path: Path) -> None:
    """Also where the fault before it was found rightly."""
    series = Series(trials=(trial("stop", 5),))
    said = [(14.0, 1, Fault.STOPPED, "node1"), (24.0, 2, Fault.HELD, "node0")]
    results, _ = read_series(series, played(tmp_path, {5: 10.0}, said, STEPS), calm(), tmp_path)
    (row,) = card(results)
    assert (row.precision, row.recall, row.culprits) == (0.5, 1.0, 1.0)


def test_what_a_job_ended_before_is_missed_and_what_ended_it_is_not_found(tmp_path: Path) -> None:
    """The faults before it keep their verdicts and their bits; those after it are tried in another job."""
    series = Series(trials=(trial("stop", 5), trial("gil", 11), trial("spin", 17)))
    said = [(14.0, 1, Fault.STOPPED, "node1")]
    results, missed = read_series(series, played(tmp_path, {5: 10.0, 11: 20.0}, said, 11), calm(), tmp_path)
    assert [(result.trial.kind, result.classed, result.same_bits) for result in results] == [
        ("stop", True, True),
        ("gil", False, False),
    ]
    assert [one.kind for one in missed] == ["spin"]


def test_a_job_that_never_began_is_its_first_faults(tmp_path: Path) -> None:
    """Else it would be played for ever."""
    series = Series(trials=(trial("stop", 5), trial("gil", 11)))
    results, missed = read_series(series, played(tmp_path, {}, [], 2), calm(), tmp_path)
    assert [(result.happened, math.isnan(result.recovered)) for result in results] == [(False, True)]
    assert [one.kind for one in missed] == ["gil"]
