"""The benchmark of health: its arithmetic, what it reads from peers, and a small run of what measures costs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.bench import hangs, health_cost, health_cures
from chaos.bench.hangs import CULPRIT, Verdict, blamed, timed_out
from chaos.bench.health_card import total
from chaos.bench.health_cost import Cost, Recording, pairs_of
from chaos.bench.health_cures import ILL, Cure
from chaos.score.controls import ALARMS, CONTROLS, WAITS, Calm
from chaos.score.results import Result, Said
from chaos.score.trials import Trial
from chaos.scripts.train_strained import Strain
from elastic3d.health.stuck import Fault
from elastic3d.log import EVENTS
from elastic3d.planner.paced import share_out, step_seconds
from elastic3d.values import Layout, ModelProfile

COST = Cost(
    parameters=1,
    on=(1.1, 2.0),
    off=(1.0, 2.0),
    recording=(Recording(calls=3, record=100.0, beat=10.0, watch=5.0),),
    plain=(1.0, 2.0),
    audited=(1.25, 3.0),
    every=25,
)


def result(kind: str, fault: str | None, *, node: str = "node1", generation: int = 1, more: int = 0) -> Result:
    said = [
        Said(fault=fault, nodes=(node,), ranks=(1,), act=True, after=3.0, detail="", generation=generation + number)
        for number in range(1 + more)
        if fault is not None
    ]
    return Result(
        trial=Trial(kind=kind, rank=1, step=5, micro_batch=0, layout=Layout(pp=1, dp=2)),
        node="node1",
        happened=True,
        said=tuple(said),
        recovered=math.nan,
        steps_lost=0,
        same_bits=True,
    )


def calm(*alarms: str) -> Calm:
    return Calm(control=WAITS, seconds=60.0, alarms=alarms, broken=())


def test_costs_are_those_of_pairs() -> None:
    """And those of audits are spread over the steps from one to the next."""
    assert COST.costs == pytest.approx([10.0, 0.0])
    assert COST.audits == pytest.approx([1.0, 2.0])
    assert COST.recording[0].total == 110.0


def test_an_audited_step_is_compared_with_the_one_beside_it() -> None:
    """Where both neighbours are audited too, with none."""
    seconds = [1.0, 5.0, 2.0, 6.0, 7.0, 8.0]
    assert pairs_of(seconds, [False, True, False, True, True, True]) == ([2.0, 2.0], [5.0, 6.0])


def test_the_total_counts_what_is_said_of_the_healthy() -> None:
    """In a control, after a cure, and of the wrong node; silence costs recall alone."""
    assert total([result("stop", Fault.STOPPED), result("stall", None)], [calm()]).passed
    silent = total([result("stop", Fault.STOPPED), result("stop", None)])
    assert (silent.precision, silent.recall, silent.culprits) == (1.0, 0.5, 0.5)
    for wrong in (
        total([result("stop", Fault.STOPPED), result("stall", Fault.LOADER)]),
        total([result("stop", Fault.STOPPED, more=1)]),
        total([result("stop", Fault.STOPPED)], [calm("rank.stuck: idle")]),
        total([result("stop", Fault.STOPPED), result("stop", Fault.STOPPED, node="node0")]),
    ):
        assert wrong.precision == 0.5
        assert not wrong.passed


def test_nothing_tried_is_nothing_wrong() -> None:
    """As with `--faults 0`."""
    assert total([]).passed


def test_what_the_monitors_say_names_their_ranks(tmp_path: Path) -> None:
    """Each line carries the rank that its monitor is connected to."""
    log = tmp_path / "launcher.log"
    log.write_text(
        "[2026-01-01 00:00:00,000] [WARNING] [RankMonServer123@host:2] Section 'compute' has been open for 3.10 s.\n"
        "[2026-01-01 00:00:00,000] [WARNING] [RankMonServer123@host:2] FT timeout elapsed.\n"
        "[2026-01-01 00:00:00,000] [WARNING] [RankMonServer124@host:<none>] FT timeout elapsed.\n"
    )
    assert timed_out(log) == {2}


def test_what_the_analyzer_says_first_names_a_rank() -> None:
    """One that is missing from a collective, or whose record is missing."""
    assert blamed(["expected ranks: {0, 1}", "missing ranks: {2}", "missing ranks: {0, 1, 3}"]) == (2,)
    assert blamed(["because we missed FR dumps from ranks ({2}) so we don't"]) == (2,)
    assert blamed(["All ranks joined"]) == ()


def test_a_verdict_says_whether_the_culprit_was_named() -> None:
    """Alone; all ranks at once are no answer."""
    given = [(), (CULPRIT,), (0, 1), (0, 1, 2, 3)]
    said = [str(Verdict(system="", fault="stop", seconds=3.0, named=named)) for named in given]
    assert said == ["3.0 s, nobody", "3.0 s, the culprit", "3.0 s, ranks 0, 1", "3.0 s, all ranks"]
    assert str(Verdict(system="", fault="stop", seconds=None, named=(), said="no wheel")) == "no wheel"


def test_controls_know_their_strains_and_look_for_events_that_exist() -> None:
    """No two strains of a job share a step, since each leaves a mark of it."""
    for control in CONTROLS:
        steps = [Strain.parse(strain).step for strain in control.strains]
        assert len(set(steps)) == len(steps)
        assert all(step < control.steps for step in steps)
    assert {"rank.stuck", "training.stalled", "node.lying"} <= set(ALARMS) & set(EVENTS)


@pytest.mark.gloo
@pytest.mark.long
def test_steps_with_and_without_health_are_made_in_one_world() -> None:
    """Every step is timed, those without leave no record, and a recorded step is recorded again by itself."""
    # In a process of its own: what forks the ranks stays for as long as its process does.
    code = (
        "import json; from chaos.bench import health_cost as h; "
        "print(json.dumps(h.as_json(h.measure(width=32, depth=2, pairs=2))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    cost = json.loads(done.stdout)
    assert len(cost["on"]) == len(cost["off"]) == 2
    assert cost["every"] > 1
    assert all(one["calls"] > 10 and 0 < one["record"] < 1e6 for one in cost["recording"])
    assert cost["audited"]


def test_tables_show_every_figure() -> None:
    """The ratio of the pairs, the audits, and the microseconds of each part."""
    steps, rows = health_cost.tables(COST)
    assert (steps.row_count, rows.row_count) == (4, 4)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("fault", hangs.FAULTS)
def test_torchs_analyzer_is_given_what_the_ranks_recorded(fault: str, tmp_path: Path) -> None:
    """And names the rank that is missing."""
    verdict = hangs.peer("recorder", fault, tuned=True, packages=tmp_path, title="")
    assert verdict.named == (CULPRIT,), verdict.said


def test_a_cure_is_compared_with_the_best_layout() -> None:
    """By the time of a step; whoever reads the figures sees both."""
    times = {"before": 0.5, "slow": 1.0, "after": 0.66, "best": 0.6}
    cure = Cure(name="stages", named=30.0, cured=50.0, said="", **times)
    assert cure.ratio == pytest.approx(1.1)
    assert health_cures.as_json([cure])[0]["ratio"] == cure.ratio
    assert len(health_cures.table([cure]).rows) == 1


@pytest.mark.parametrize("ill", ILL, ids=lambda ill: ill.name)
def test_nothing_is_better_than_what_cures_are_compared_with(ill: health_cures.Ill) -> None:
    """No other cut; no shares that the planner would rather have."""
    profile = ModelProfile(
        blocks=health_cures.BLOCKS, parameters=1, micro_batches=ill.micro_batches, micro_batch=2, digest="job"
    )
    speeds = tuple(1 / health_cures.FACTOR if rank == health_cures.SLOW else 1.0 for rank in range(4))
    best = step_seconds(ill.best, profile, 1, speeds)
    others = [replace(ill.began, cuts=(cut,)) for cut in range(1, profile.blocks)] if ill.began.pp > 1 else []
    others += [shared] if (shared := share_out(ill.began, profile, 1, speeds)) is not None else []
    assert others
    assert all(best <= step_seconds(other, profile, 1, speeds) for other in others)
