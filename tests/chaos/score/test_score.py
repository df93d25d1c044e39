"""The score card counts what it ought to, and draws the same jobs from the same seed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chaos.commands import score as command
from chaos.commands.app import app
from chaos.history.follow import Event, Injection, Picture
from chaos.playing.outcome import Outcome
from chaos.score.card import card, quantile
from chaos.score.kinds import KINDS, KNOWN, NOT_FINITE, SELDOM, SPIKED
from chaos.score.playing import quota, setting
from chaos.score.reading import read, verdict_of
from chaos.score.results import Result, Said
from chaos.score.trials import SEED, Trial, trials
from chaos.scripts.injectors.fault import LEADER, NEWCOMER
from chaos.scripts.injectors.kinds import parse
from elastic3d.health import recheck
from elastic3d.health.hearing import Finding
from elastic3d.health.stuck import Fault
from elastic3d.values import Layout
from tests.paths import ROOT


def result(kind: str, fault: str | None, node: str = "node1", *, same_bits: bool = True, after: float = 4.0) -> Result:
    said = () if fault is None else (Said(fault=fault, nodes=(node,), ranks=(1,), act=True, after=after, detail=""),)
    trial = Trial(kind=kind, rank=1, step=6, micro_batch=0, layout=Layout(pp=1, dp=2))
    return Result(
        trial=trial,
        node="node1",
        happened=True,
        said=said,
        recovered=math.nan if fault is None else 6.0,
        steps_lost=1,
        same_bits=same_bits,
    )


def test_a_card_of_right_verdicts_passes() -> None:
    """And a control about which nothing was said."""
    rows = card([result("stop", Fault.STOPPED, after=3.0), result("stop", Fault.STOPPED), result("stall", None)])
    assert all(row.passed for row in rows)
    assert next((row.kind, row.p50, row.p95) for row in rows) == ("stop", 3.0, 4.0)


@pytest.mark.parametrize(
    ("wrong", "precision", "recall", "culprits"),
    [
        (result("stop", Fault.STOPPED, "node0"), 0.5, 1.0, 0.5),
        (result("stop", Fault.IDLE), 1.0, 0.5, 1.0),
        (result("stop", None), 1.0, 0.5, 0.5),
        (result("stop", Fault.STOPPED, same_bits=False), 1.0, 1.0, 1.0),
    ],
)
def test_a_wrong_node_a_wrong_class_silence_and_other_bits_fail(
    wrong: Result, precision: float, recall: float, culprits: float
) -> None:
    """Each in its own column."""
    (row,) = card([result("stop", Fault.STOPPED), wrong])
    assert (row.precision, row.recall, row.culprits) == (precision, recall, culprits)
    assert not row.passed


def test_anything_done_in_a_control_fails_it_and_the_class_it_was_called() -> None:
    """A false alarm costs precision where it was filed."""
    rows = {row.kind: row for row in card([result("stall", Fault.LOADER), result("loader", Fault.LOADER)])}
    assert not rows["stall"].passed
    assert rows["loader"].precision == 0.5


def heard(kind: str, *given: Said, rank: int = 1, liar: str = "") -> Result:
    trial = Trial(kind=kind, rank=rank, step=6, micro_batch=0, layout=Layout(pp=1, dp=4))
    return Result(
        trial=trial,
        node="node1",
        happened=True,
        said=given,
        recovered=6.0,
        steps_lost=1,
        same_bits=True,
        liar=liar,
    )


def said(
    fault: str,
    *ranks: int,
    nodes: tuple[str, ...] = (),
    step: int = 6,
    samples: tuple[tuple[int, int], ...] = (),
) -> Said:
    return Said(fault=fault, nodes=nodes, ranks=ranks, act=True, after=3.0, detail="", step=step, samples=samples)


@pytest.mark.parametrize(
    ("result", "right"),
    [
        (heard("blackhole", said(Fault.LINK, 0, 1)), True),
        (heard("blackhole", said(Fault.LINK, 1, nodes=("node1",))), True),
        (heard("blackhole", said(Fault.LINK, 0, 1, 2, 3)), False),
        (heard("blackhole", said(Fault.LINK, 0, 2)), False),
        (heard("deadlock", said(Fault.DEADLOCK, 1, 3)), True),
        (heard("deadlock", said(Fault.DEADLOCK, 0, 3)), False),
        (heard("flip", said(Finding.TRANSIENT, 1, nodes=("node1",))), True),
        (heard("flip", said(Finding.TRANSIENT, 1, nodes=("node1",), step=7)), False),
        (heard("flip", said(Finding.PERSISTENT, 1, nodes=("node1",))), False),
        (heard("sticky", said(Finding.PERSISTENT, 1, nodes=("node1",), step=7)), True),
        (heard("sticky", said(Finding.PERSISTENT, 1, nodes=("node1",)), said(Finding.TRANSIENT, nodes=("a",))), False),
        (heard("liars", said(Finding.PERSISTENT, 1, 2, nodes=("node1", "node2")), liar="node2"), True),
        (heard("liars", said(Finding.PERSISTENT, 1, 2, nodes=("node1", "node2")), liar="node3"), False),
        (heard("wire", said("altered on its way", 0, 1)), True),
        (heard("wire", said("altered on its way", 0, 2)), False),
        (heard("gather", said("gathered otherwise", 1, nodes=("node1",))), True),
        (heard("gather", said("gathered otherwise", 0, 1, nodes=("node0", "node1"))), False),
        (heard("vote", said("split vote", 1, nodes=("node1",))), True),
        (heard("vote", said("split vote", 1, nodes=("node1",), step=7)), False),
        (heard("newcomer", said("failed exam", 1, nodes=("node1",), step=60)), True),
        (heard("nandevice", said(Finding.PERSISTENT, 1, nodes=("node1",))), True),
        (heard("nandevice", said(NOT_FINITE, samples=((96, 98),))), False),
        (heard("nan", said(NOT_FINITE, samples=((96, 98),))), True),
        (heard("nan", said(NOT_FINITE, samples=((96, 100),))), False),
        (heard("nan", said(Finding.PERSISTENT, 1, nodes=("node1",))), False),
        (heard("spike", said(SPIKED, samples=((-16, 144),))), True),
        (heard("spike", said(SPIKED, samples=((0, 144),))), False),
    ],
)
def test_whom_a_verdict_may_name(result: Result, right: bool) -> None:
    """A pair, edges, a liar and perhaps another one; never anybody who is honest, and soon."""
    assert (result.named and result.classed) is right


def test_what_was_not_tried_is_not_passed() -> None:
    """And does not count among what was."""
    result = replace(heard("blocked"), skipped="no FUSE", same_bits=False)
    (row,) = card([result])
    assert (row.trials, row.skipped, row.passed) == (0, 1, False)
    (row,) = card([result, heard("blocked", said(Fault.BLOCKED, 1, nodes=("node1",)))])
    assert (row.trials, row.skipped, row.passed) == (1, 1, True)


def test_trials_are_drawn_from_the_seed() -> None:
    """The same seed meets the same ranks at the same steps, and each fault is one that the script knows."""
    drawn = list(trials(list(KINDS), 2, 3, steps=24, most=2))
    assert drawn == list(trials(list(KINDS), 2, 3, steps=24, most=2))
    assert drawn != list(trials(list(KINDS), 2, 4, steps=24, most=2))
    for trial in drawn:
        assert trial.layout.world <= 2 or KINDS[trial.kind].lies or KINDS[trial.kind].late
        if trial.fault:
            of = parse(trial.fault, Path()).of
            assert of == {"leader": LEADER, "newcomer": NEWCOMER}.get(trial.kind, trial.rank)


def test_a_wrong_update_is_one_that_somebody_computes_again() -> None:
    """Else nobody could say so."""
    assert SELDOM == 2 * recheck.EVERY - 1
    for trial in trials(["update"], 5, 3, steps=48):
        assert recheck.shift_at(trial.step, (1,), seed=SEED) is not None


@pytest.mark.parametrize(
    ("name", "fields", "fault", "act"),
    [
        ("audit.failed", {"compared": "passes", "finding": "transient"}, Finding.TRANSIENT, True),
        ("audit.failed", {"compared": "transit", "finding": "transient"}, "altered on its way", True),
        ("audit.failed", {"compared": "weights", "finding": "persistent"}, "gathered otherwise", True),
        ("audit.failed", {"compared": "sum", "finding": "undecided"}, "added up wrongly", False),
        ("exam.failed", {"compared": "passes", "finding": "undecided"}, "failed exam", True),
        ("vote.split", {"acted": True}, "split vote", True),
        ("vote.split", {"acted": False}, "split vote", False),
        ("update.wrong", {"acted": False, "finding": "transient"}, "wrong update", False),
        ("node.lying", {"compared": "update"}, "wrong update", True),
        ("state.altered", {"acted": True}, "altered", True),
        ("node.slow", {"kind": "link"}, "slow link", True),
        ("rank.stuck", {"fault": "link", "act": True}, "link", True),
        ("memory.short", {"act": True}, "out of memory", True),
    ],
)
def test_what_events_call_a_fault(name: str, fields: dict[str, Any], fault: str, act: bool) -> None:
    """Each kind of what is compared by its own name, and whether anything was done about it."""
    fields = {"nodes": ["node1"], "ranks": [1], "step": 7, "detail": "", **fields}
    verdict = verdict_of(Event(name=name, at=9.0, generation=2, node="node0", slot=0, rank=None, fields=fields))
    assert verdict is not None
    assert (verdict.fault, verdict.act, verdict.nodes, verdict.step) == (fault, act, ("node1",), 7)


def test_quantiles() -> None:
    """The value that a share of the values does not exceed."""
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert math.isnan(quantile([], 0.5))


def test_what_is_slow_says_how_slow(tmp_path: Path) -> None:
    """It stays with the node, in whatever generation; on other nodes and before its step nothing is slow."""
    fault = parse("slow:1@8:1.3", tmp_path)
    assert (fault.kind, fault.of, fault.step, fault.factor) == ("slow", 1, 8, 1.3)
    fault.begin(1, 7)
    assert not fault.slowed
    fault.begin(0, 8)
    assert not fault.slowed
    fault.begin(1, 8)
    assert fault.slowed
    later = parse("slow:1@8:1.3", tmp_path)
    later.begin(0, 9)
    assert later.slowed, "the same node has another rank now"
    other = parse("sluggish:0@12:0.1", tmp_path)
    other.begin(1, 12)
    assert not other.slowed


def test_a_slow_node_is_a_verdict(tmp_path: Path) -> None:
    """It is read from what is said of it, from when it became slow, whether a script or the player made it so."""
    (tmp_path / "events").mkdir()
    (tmp_path / "out").mkdir()
    said = {"nodes": ["node1"], "ranks": [1], "kind": "compute", "step": 96, "detail": "", "generation": 1}
    line = {"event": "node.slow", "run": "r", "node": "node0", "slot": 0, "at": 130.0, **said}
    (tmp_path / "events" / "node0.jsonl").write_text(json.dumps(line) + "\n")
    trial = Trial(kind="quota", rank=1, step=KNOWN, micro_batch=0, layout=Layout(pp=1, dp=2))
    assert trial.fault == ""
    assert replace(trial, kind="tenth").fault == f"slow:1@{KNOWN}:1.1"
    quiet = Outcome(
        setting=setting(None, trial.layout, 8),
        faults=(),
        picture=Picture(),
        digest="d",
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
    )
    for kind in ("throttle", "delay"):
        done = Injection(kind=kind, node="node1", at=100.0)
        result = read(trial, replace(quiet, injections=(done,)), quiet, tmp_path)
        assert result.first is not None
        assert (result.node, result.first.fault, result.first.after) == ("node1", "compute", 30.0)
        assert result.named
        assert result.classed
    assert not read(replace(trial, kind="busy"), quiet, quiet, tmp_path).happened
    never = read(trial, quiet, quiet, tmp_path).broken
    assert "it did not happen: no generation" in never, "a fault that was never made says why, as far as is known"
    assert not read(replace(trial, kind="busy"), quiet, quiet, tmp_path).broken[0].startswith("it did not happen")


TRIED: Mapping[str, tuple[str, ...]] = {
    "a trainer that is stopped, or held, or waits": ("stop", "gil", "lock", "blocked"),
    "a trainer that spins": ("spin",),
    "a data loader that hangs, and one that comes back": ("loader", "stall"),
    "a program that is left": ("skip", "order", "shape", "dtype", "deadlock"),
    "a connection that passes nothing one way": ("blackhole",),
    "a node that is slow, in stages of unlike size too": ("tenth", "slow", "slowdevice", "quota"),
    "a slow connection": ("link", "health/test_links.py::test_the_endpoint_of_slow_connections_is_named"),
    "a flip on an audited micro-batch": ("flip", "forward", "backward", "sticky"),
    "a flip elsewhere": ("rest", "update", "updates", "gather", "wire", "fold", "vote"),
    "a flip in a snapshot": ("snapshots/test_lending.py::test_a_flipped_byte_is_found_and_mended_from_the_buddy",),
    "liars": ("liars", "auditor", "leader", "newcomer"),
    "numbers": ("nan", "nandevice", "spike"),
    "memory of the host": ("memory",),
    "memory of a device": ("devicememory",),
    "a death in a hearing": ("parallel/test_auditing.py::test_a_death_in_a_hearing_is_a_death_and_convicts_nobody",),
    "a death in a change": ("chaos/simulation/test_slow_nodes.py::test_random_faults_of_jobs_with_slow_nodes",),
    "a death in a rollback": ("histories/test_spikes.py::test_the_run_goes_back_and_leaves_them_out",),
    "controls": ("oversubscribed", "busy"),
}
"""By what may happen to a job, the rows that try it, or the test that does."""


def test_what_may_happen_to_a_job_is_tried() -> None:
    """By a row of the card, of which none is left over, or by a test."""
    rows = {name for names in TRIED.values() for name in names if "::" not in name}
    assert rows == set(KINDS)
    for names in TRIED.values():
        for file, _, test in (name.partition("::") for name in names if "::" in name):
            assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_a_quota_is_of_what_a_rank_would_have_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on two processors have one each; four have half of one, and a node with 0.4 of one was hardly slow."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert [quota(0.4, ranks) for ranks in (1, 2, 4)] == [0.4, 0.4, 0.2]
    assert quota(0.0, 4) == 0.0


def test_what_is_kept_may_be_in_a_folder_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes' store there has a URL, and that is of an absolute one."""
    given: list[Path] = []

    def play(*_: object, workdir: Path, **__: object) -> tuple[Result, ...]:
        given.append(workdir)
        return ()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "play_all", play)
    result = CliRunner().invoke(app, ["score", "--kind", "stop", "--out", "kept"])
    assert result.exit_code == 0, result.output
    assert given == [tmp_path / "kept"]


def test_a_folder_in_which_there_is_something_is_refused_beforehand(tmp_path: Path) -> None:
    """As that of an earlier call, whose jobs have the same names."""
    (tmp_path / "quiet-60").mkdir()
    result = CliRunner().invoke(app, ["score", "--kind", "stop", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert f"--out {tmp_path}: there is something in it already" in result.stderr
