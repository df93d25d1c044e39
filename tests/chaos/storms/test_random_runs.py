"""Runs with drawn schedules: what is drawn surely happens, what is told of it, and how a failing one is made small."""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands import random_storms, shrink
from chaos.commands.app import app
from chaos.commands.random_storms import exit_code, line, numbers, seeds, summary
from chaos.commands.shrink import failed, number_of
from chaos.faults.catalogue import KINDS
from chaos.faults.etcd import EtcdDeleted, EtcdEmpty, EtcdPause, EtcdRestart, Revoke
from chaos.faults.fault import Fault, Need, OfNode
from chaos.faults.memory import SnapshotFlip
from chaos.faults.moment import When
from chaos.faults.orders import Drain, Join
from chaos.faults.process import Flap, Kill, KillTrainer, Pause
from chaos.faults.store import StoreBusy, StoreDenies, StoreGone
from chaos.history.follow import Picture
from chaos.playing.outcome import Outcome
from chaos.playing.own_script import ScriptSetting
from chaos.report import junit
from chaos.report.random_documents import DrawnRun, RandomDocument, RunVerdict, SkippedFault
from chaos.schedules.as_test import as_test
from chaos.schedules.draw import ORDINARY, draw_schedule, last_step
from chaos.schedules.files import parse
from chaos.schedules.schedule import Schedule, check
from chaos.schedules.smaller import smaller, smallest
from chaos.schedules.sure import (
    SAVED,
    begins_generation,
    check_sure,
    check_waits,
    fewest_nodes,
    saved_before,
    takes_memory,
)
from chaos.storms import random_runs
from chaos.storms.random_runs import Chances, draw_run, play_run, saved_step, words_of
from chaos.storms.storm import Job, Storm, keep, kept_storm
from elastic3d.errors import EtcdUnavailable, UsageError
from elastic3d.values import Layout
from tests.chaos.storms.test_storm import setting, storm

A, B = When(step=5), When(step=9)
JOB = Job(script="train.py", seed=7)
CHANCES = Chances(words=ORDINARY, each=(3, 5), nodes=4, steps=40, saved=5)


def test_drawn_schedules_surely_happen() -> None:
    """Some node is left, the state is in a checkpoint before both copies may be gone, and nothing comes too late."""
    for seed in range(100):
        schedule, job = draw_run(seed, CHANCES, JOB)
        assert (schedule, job) == draw_run(seed, CHANCES, JOB)
        assert 3 <= len(schedule.faults) <= 5
        assert 2 <= job.nodes <= 4
        check(schedule.faults, nodes=job.nodes, steps=40)
        check_sure(schedule.faults, nodes=job.nodes, saved=True)
        assert all(fault.when.step <= last_step(40) == 35 for fault in schedule.faults)
        lost = [fault for fault in schedule.faults if takes_memory(fault)]
        assert sum(fault.when.event == SAVED for fault in lost) >= len(lost) - 1


def test_what_befalls_a_snapshot_is_drawn_for_a_rank() -> None:
    """A node that no layout has to use holds none, so that the moment would never come."""
    drawn = [draw_schedule(seed, nodes=3, steps=40, faults=1, words=["flip-snapshot"]) for seed in range(30)]
    assert {fault.node for one in drawn for fault in one.faults if isinstance(fault, OfNode)} == {"rank0", "rank1"}


def test_where_nodes_have_two_slots_what_befalls_trainers_is_drawn_for_the_first_half() -> None:
    """Four nodes of two slots may have a spare: six ranks are as quick with four micro-batches as eight.

    Nor does anything wait for a generation that follows if such a node goes.
    """
    chances = replace(CHANCES, words=("flip-snapshot", "kill-trainer", "clock", "drain"), slots=2)
    for seed in range(40):
        schedule, job = draw_run(seed, chances, JOB)
        if job.slots == 2:
            waits = any(fault.when.generation for fault in schedule.faults)
            assert not waits or any(isinstance(fault, KillTrainer) for fault in schedule.faults)
            drawn = (fault.node for fault in schedule.faults if isinstance(fault, SnapshotFlip | KillTrainer))
            assert {int(node.removeprefix("rank")) for node in drawn} <= set(range(0, job.nodes // 2 * 2, 2))


def test_draws_cover_every_kind_layout_and_moment() -> None:
    """All words that any script can meet, every number of nodes, two slots, faults together and in recoveries."""
    runs = [draw_run(seed, Chances(**{**_values(CHANCES), "slots": 2}), JOB) for seed in range(300)]
    faults = [fault for schedule, _ in runs for fault in schedule.faults]
    assert {fault.WORD for fault in faults} == {*ORDINARY}
    assert {(job.nodes, job.slots) for _, job in runs} == {(n, s) for n in (2, 3, 4) for s in (1, 2)}
    assert any(fault.when.generation for fault in faults)
    assert any(len({fault.when for fault in schedule.faults}) < len(schedule.faults) for schedule, _ in runs)


def _values(chances: Chances) -> dict[str, object]:
    return {name: getattr(chances, name) for name in Chances.__dataclass_fields__}


def test_a_small_job_gets_more_nodes_where_its_faults_need_them() -> None:
    """Up to the most that were asked for; beyond that it is refused."""
    chances = Chances(words=("drain",), each=(3, 3), nodes=4, steps=40, saved=5)
    assert {draw_run(seed, chances, JOB)[1].nodes for seed in range(20)} == {4}
    with pytest.raises(UsageError, match="4 faults cannot happen to 4 nodes in 40 steps; ask for 3"):
        draw_run(1, Chances(words=("drain",), each=(4, 4), nodes=4, steps=40), JOB)


def test_nodes_that_the_script_needs_are_left() -> None:
    """As many as `--least` says."""
    for seed in range(50):
        schedule, job = draw_run(seed, Chances(**{**_values(CHANCES), "least": 2}), JOB)
        assert job.nodes - sum(-1 in fault.CHANGES for fault in schedule.faults) >= 2


@pytest.mark.parametrize(
    ("asked", "fewest"),
    [
        ("pp=2", {1: 2, 2: 1}),
        ("pp=3", {1: 3, 2: 3}),
        ("tp=2", {1: 0, 2: 1}),
        ("pp=2,tp=2", {1: 0, 2: 2}),
        ("cp=2,dp=3", {1: 0, 2: 3}),
        ("pp=2,dp=2", {1: 4, 2: 2}),
        ("pp=3,dp=1", {1: 3, 2: 0}),
        ("zero=2", {1: 1, 2: 1}),
    ],
)
def test_a_layout_that_is_asked_for_takes_whole_nodes(asked: str, fewest: dict[int, int]) -> None:
    """Its tensor-parallel and context-parallel ranks share a node; 0 where no number of nodes will do."""
    layout = Layout.parse(asked)
    assert {slots: fewest_nodes(layout, slots) for slots in fewest} == fewest
    for seed in range(30):
        schedule, job = draw_run(seed, replace(CHANCES, slots=2, asked=layout, each=(2, 3)), JOB)
        needed = fewest[job.slots]
        assert job.nodes - sum(-1 in fault.CHANGES for fault in schedule.faults) >= needed > 0


def test_a_layout_that_no_nodes_can_have_is_refused() -> None:
    """Rather than played until somebody wonders."""
    with pytest.raises(UsageError, match=r"tp=4, which 4 nodes of 2 slots cannot have: give more --nodes or --slots"):
        replace(CHANCES, slots=2, asked=Layout(tp=4))


def test_nothing_waits_for_a_generation_that_the_loss_of_a_spare_does_not_begin() -> None:
    """Of three nodes one may be a spare of two stages; of four none is before anything is lost."""
    lost = Drain(node="node1", when=A)
    assert begins_generation(lost, 2, asked=Layout(pp=2))
    assert not begins_generation(lost, 3, asked=Layout(pp=2))
    assert begins_generation(lost, 4, asked=Layout(pp=2))
    assert begins_generation(KillTrainer(node="rank1", when=A), 3, asked=Layout(pp=2))
    assert not begins_generation(lost, 4, asked=Layout(pp=2, dp=1))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Kill(node="node0", when=A), Flap(node="node1", when=B)], "2 losses leave 0 of 2 nodes"),
        ([Kill(node="leader", when=A), Revoke(node="node1", when=B)], "node1 may be gone by then, after kill leader"),
        ([Flap(node="node1", when=A), KillTrainer(node="node1", when=B)], "node1 may be gone by then"),
        ([Drain(node="node0", when=A), Revoke(node="leader", when=B)], "nobody may know who leads after drain"),
        ([Kill(node="node0", when=A), KillTrainer(node="rank1", when=B)], "there may be no such rank"),
        ([EtcdPause(when=A), Drain(node="node0", when=B)], "etcd may be away then, after pause etcd"),
        ([EtcdPause(when=A), EtcdRestart(when=B)], "the one may last until the job ends"),
        ([EtcdDeleted(when=A), Revoke(node="node0", when=B)], "the node may have no lease again"),
        ([StoreGone(when=A), StoreGone(when=B)], "the one may last until the job ends"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(str(fault) for fault in value),
)
def test_what_may_not_happen_is_not_drawn(faults: list[Fault], message: str) -> None:
    """Though a schedule may have it."""
    check(faults, nodes=2, steps=40)
    with pytest.raises(UsageError, match=message):
        check_sure(faults, nodes=2, saved=True)


@pytest.mark.parametrize("second", [Flap(node="node1", when=B), SnapshotFlip(node="node1", when=B)], ids=str)
@pytest.mark.parametrize("first", [Kill(node="node0", when=A), SnapshotFlip(node="node0", when=A)], ids=str)
def test_both_copies_of_the_state_are_lost_only_after_a_checkpoint(first: Fault, second: Fault) -> None:
    """And not while the store may be gone, or refuse one. On a busy machine both are made at one step.

    A damaged snapshot may be what the first checkpoint is made of, so that it waits for this as well.
    """
    lost = [first, second]
    check_sure(lost, nodes=4, saved=True)
    with pytest.raises(UsageError, match="they may be all that hold the state"):
        check_sure(lost, nodes=4)
    with pytest.raises(UsageError, match="the state may have to come from the store"):
        check_sure([*lost, StoreGone(when=A)], nodes=4, saved=True)
    with pytest.raises(UsageError, match="the state may have to come from the store"):
        check_sure([*lost, StoreDenies(when=B)], nodes=4, saved=True)
    waits = [fault.when.event == SAVED for fault in saved_before(lost, 10, 40)]
    assert waits == [isinstance(first, SnapshotFlip), True]
    assert saved_before([first], 10, 40) == [first]
    assert (saved_step((10, 20, 40), 40), saved_step((40,), 40), saved_step((), 40)) == (10, 0, 0)


def test_nothing_waits_for_a_checkpoint_that_a_store_may_delay() -> None:
    """Of step 5: requests that are refused from step 9 on may be those of it, those from step 10 on hardly."""
    flip = SnapshotFlip(node="rank0", when=replace(A, event=SAVED))
    check_waits([flip, StoreBusy(when=When(step=10))], saved=5)
    check_waits([replace(flip, when=A), StoreBusy(when=B)], saved=5)
    with pytest.raises(UsageError, match="a checkpoint may come too late, after store-busy"):
        check_waits([flip, StoreBusy(when=B)], saved=5)
    for seed in range(60):
        schedule, _ = draw_run(seed, CHANCES, JOB)
        check_waits(schedule.faults, CHANCES.saved)


def test_a_folder_and_an_object_store_are_not_one_stores_faults() -> None:
    """A job has one store."""
    with pytest.raises(UsageError, match="one is of a store in a folder"):
        check([StoreGone(when=A), StoreBusy(when=B)], nodes=4)


def test_what_cannot_be_made_is_left_out_by_name() -> None:
    """Unless it is asked for: then it is drawn, and skipped."""
    words, left_out = words_of("", 1)
    assert {*words} | {one.fault for one in left_out} == {*KINDS}
    assert {"cont", "kill-companion", "flip"} <= {one.fault for one in left_out}
    assert all(one.why for one in left_out)
    assert "kill-companion" in words_of("", 2)[0]
    assert words_of("kill, blocked", 1) == (("kill", "blocked"), ())
    assert not {"delay", "cut"} & {*words_of("", 1, loopback=True)[0]}
    with pytest.raises(UsageError, match="no fault 'kil'"):
        words_of("kil", 1)
    assert {word for word in ORDINARY if Need.SCRIPT in KINDS[word].ABOUT.needs} == set()


def test_a_run_of_which_nothing_can_be_made_is_skipped(tmp_path: Path) -> None:
    """And was not played."""
    schedule = draw_schedule(3, nodes=4, steps=40, faults=2, words=["spin", "lock"])
    run = play_run(schedule, JOB, kept=tmp_path, out=tmp_path)
    assert (run.verdict, run.seed, len(run.skipped)) == (RunVerdict.SKIPPED, 3, 2)


def run(seed: int, verdict: RunVerdict, **more: object) -> DrawnRun:
    values: dict[str, object] = {
        "seed": seed,
        "nodes": 3,
        "slots": 1,
        "faults": ("kill node1@5", "join @9"),
        "verdict": verdict,
        "seconds": 2.5,
        "skipped": (),
        "broken": (),
        "generations": 3,
        "steps_repeated": 1,
        "folder": None,
    }
    return DrawnRun(**{**values, **more})  # type: ignore[arg-type]


SKIPPED = SkippedFault(fault="join @9", why="no gate")
KEPT = run(7, RunVerdict.KEPT)
BROKEN = run(8, RunVerdict.BROKEN, broken=("digest \x1b[1m0ab, undisturbed 1", "<left>"), folder="out/failed-8")
PARTLY = run(9, RunVerdict.PARTLY, skipped=(SKIPPED,))
NOTHING = run(10, RunVerdict.SKIPPED, skipped=(SKIPPED, SKIPPED), generations=0, steps_repeated=0)


def document(*runs: DrawnRun) -> RandomDocument:
    return RandomDocument(script="train.py", seed=7, steps=40, left_out=(), runs=runs, interrupted=False)


def test_runs_as_junit_xml(tmp_path: Path) -> None:
    """A test case each; what was not wholly played is skipped, and what XML cannot hold is replaced."""
    cases = tuple(junit.drawn_cases(document(KEPT, BROKEN, PARTLY, NOTHING)))
    junit.write(tmp_path / "new" / "chaos.xml", "runs", "train.py", cases)
    (suite,) = ElementTree.parse(tmp_path / "new" / "chaos.xml").getroot()
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "4",
        "failures": "1",
        "errors": "0",
        "skipped": "2",
        "time": "10.00",
    }
    kept, broken, partly, nothing = suite
    assert (kept.get("classname"), kept.get("name")) == ("train.py", "seed 7: 3 nodes x 1: kill node1@5, join @9")
    assert list(kept) == []
    (failure,) = broken
    assert failure.get("message") == "digest \N{REPLACEMENT CHARACTER}[1m0ab, undisturbed 1"
    assert failure.text is not None
    assert failure.text.splitlines()[1:] == ["<left>", "replay: elastic3d chaos replay out/failed-8"]
    assert [one.tag for one in (*partly, *nothing)] == ["skipped", "skipped"]
    assert partly[0].get("message") == "join @9: no gate"


def invoked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *more: str) -> tuple[Result, ElementTree.Element]:
    """Return what comes of the command on a job of 40 steps, and the suite of JUnit XML."""
    script = tmp_path / "train.py"
    script.write_text("")
    calm = Outcome(
        setting=ScriptSetting(target=script, steps=40),
        faults=(),
        picture=Picture(checkpoints=(5, 40)),
        digest="ab",
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
    )
    monkeypatch.setattr(random_storms, "undisturbed", lambda *_, **__: (calm.setting, calm))
    xml = tmp_path / "chaos.xml"
    given = ["random", "--script", str(script), "--out", str(tmp_path / "out"), "--junit", str(xml), *more]
    result = CliRunner().invoke(app, given)
    (suite,) = ElementTree.parse(xml).getroot()
    return result, suite


def played(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, third: BaseException, *more: str
) -> tuple[Result, ElementTree.Element]:
    """Return what comes of three runs, of which the last one ends with an exception, and the suite of JUnit XML."""
    runs = iter((KEPT, PARTLY, third))

    def play(*_: object, **__: object) -> DrawnRun:
        one = next(runs)
        if isinstance(one, BaseException):
            raise one
        return one

    monkeypatch.setattr(random_storms, "play_run", play)
    return invoked(monkeypatch, tmp_path, *more)


@pytest.mark.parametrize(
    ("ends", "verdicts", "early"),
    [
        (("etcd", "", "etcd", "etcd"), ["error", "partly", "error", "error"], ""),
        (("", "etcd", "etcd", "etcd", ""), ["partly", "error", "error", "error"], "errors ended 3 runs in a row"),
        (("", "disk", ""), ["partly"], "seed 8: OSError: [Errno 28] No space left on device"),
        (("", "input", ""), ["partly"], "seed 8: there is no such file"),
    ],
    ids=["some", "all", "disk", "input"],
)
def test_an_error_of_one_run_does_not_end_the_others(
    ends: tuple[str, ...], verdicts: list[str], early: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It counts as an error; what no other run can do without ends them all, as three errors in a row do."""
    errors: dict[str, Exception] = {
        "etcd": EtcdUnavailable("no endpoint answered"),
        "disk": OSError(28, "No space left on device"),
        "input": UsageError("there is no such file"),
    }
    (tmp_path / "other.py").write_text("import elastic3d\n")
    runs = iter(ends)

    def play(*_: object, **__: object) -> Storm:
        if end := next(runs):
            raise errors[end]
        return storm(setting(tmp_path / "other.py"))

    monkeypatch.setattr(random_runs, "play_storm", play)
    more = ("--runs", str(len(ends)), "--faults", "kill,join", "--each", "1", "--json")
    result, suite = invoked(monkeypatch, tmp_path, *more)
    assert result.exit_code == (2 if "input" in ends else 1)
    kept = json.loads(result.stdout)
    assert [one["verdict"] for one in kept["runs"]] == verdicts
    assert kept["error"].startswith(early)
    assert bool(kept["error"]) is bool(early)
    assert {one["error"] for one in kept["runs"] if one["verdict"] == "error"} <= {"no endpoint answered"}
    assert suite.get("errors") == str(verdicts.count("error") + bool(early))
    assert result.stderr.count("elastic3d: no endpoint answered") == verdicts.count("error")


@pytest.mark.parametrize(
    ("third", "code", "early"),
    [
        (OSError(28, "No space left on device"), 1, "seed 9: OSError: [Errno 28] No space left on device"),
        (EtcdUnavailable("no endpoint answered"), 1, "seed 9: no endpoint answered"),
        (SystemExit(130), 130, "it was interrupted"),
    ],
    ids=["disk", "etcd", "ctrl-c"],
)
def test_what_was_played_is_told_whatever_ends_it(
    third: BaseException, code: int, early: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the document, and for a build server, to whom runs that were not played are no success."""
    result, suite = played(monkeypatch, tmp_path, third, "--json")
    assert result.exit_code == code
    kept = json.loads(result.stdout)
    assert [one["verdict"] for one in kept["runs"]] == ["kept", "partly"]
    assert (kept["interrupted"], kept["error"]) == (code == 130, "" if code == 130 else early)
    assert (suite.get("tests"), suite.get("errors"), suite.get("failures")) == ("3", "1", "0")
    assert suite[2][0].get("message") == early


def test_people_are_told_what_was_played_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what ended it."""
    result, _ = played(monkeypatch, tmp_path, EtcdUnavailable("no endpoint answered"))
    assert "It was ended early: seed 9: no endpoint answered." in result.output


def test_a_broken_promise_is_told_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run counts as broken, with why there is no folder of it."""
    script = tmp_path / "train.py"
    script.write_text("import elastic3d\n")
    broken = storm(setting(script), digest="other bits")

    def nowhere(*_: object) -> Path:
        raise UsageError("out: it cannot be written")

    monkeypatch.setattr(random_runs, "play_storm", lambda *_, **__: broken)
    monkeypatch.setattr(random_runs, "keep", nowhere)
    one = play_run(replace(broken.schedule, seed=3), Job(script=str(script)), kept=tmp_path, out=tmp_path)
    assert (one.verdict, one.folder, one.unkept) == (RunVerdict.BROKEN, None, "out: it cannot be written")
    assert "not kept: out: it cannot be written" in str(line(one))


def test_what_is_skipped_while_a_run_is_played_is_told_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what was known beforehand: such a run is no passed test, and the exit code says so."""
    script = tmp_path / "train.py"
    script.write_text("import elastic3d\n")
    partly = storm(setting(script))
    monkeypatch.setattr(random_runs, "play_storm", lambda *_, **__: partly)
    one = play_run(partly.schedule, Job(script=str(script)), kept=tmp_path, out=tmp_path)
    assert (one.verdict, [skip.why for skip in one.skipped]) == (RunVerdict.PARTLY, ["one slot"])
    assert [case.became for case in junit.drawn_cases(document(one))] == ["skipped"]
    assert exit_code(document(one)) == 4


def test_what_is_told_of_runs() -> None:
    """A line each, with what to do next for one that failed, and the totals."""
    assert str(line(KEPT)) == "seed 7: 3 nodes: kill node1@5, join @9: kept, 2.5 s"
    assert str(line(BROKEN)).splitlines()[-2:] == [
        "    elastic3d chaos replay out/failed-8",
        "    elastic3d chaos shrink out/failed-8",
    ]
    spaced = replace(BROKEN, folder="my runs/failed-8")
    assert (spaced.replay, spaced.shrink) == (
        "elastic3d chaos replay 'my runs/failed-8'",
        "elastic3d chaos shrink 'my runs/failed-8'",
    )
    assert "skipped: join @9: no gate" in str(line(PARTLY))
    told = io.StringIO()
    Console(width=80, file=told).print(summary(document(KEPT, BROKEN, PARTLY, NOTHING)))
    assert re.findall(r"\d+", told.getvalue()) == ["4", "1", "1", "1", "1", "0", "8", "3", "9", "3", "10"]
    assert re.search(r"steps repeated\W+3\b", told.getvalue()), "each is beside its name"
    codes = [exit_code(document(*runs)) for runs in ((KEPT,), (KEPT, PARTLY), (NOTHING,), (PARTLY, BROKEN))]
    assert codes == [0, 4, 4, 1]


def test_runs_end_by_their_number_or_by_time() -> None:
    """One is played in any case."""

    def clock(*times: float) -> Iterator[float]:
        yield from times

    assert list(seeds(7, 3, None, lambda: 0.0)) == [7, 8, 9]
    assert len(list(seeds(1, None, None, lambda: 0.0))) == 10
    ticks = clock(0.0, 30.0, 61.0)
    assert list(seeds(7, None, 1.0, lambda: next(ticks))) == [7, 8]
    ticks = clock(0.0, 1.0)
    assert list(seeds(7, 5, 0.0, lambda: next(ticks))) == [7]
    assert (numbers("3"), numbers("2..5")) == ((3, 3), (2, 5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--each", "5..3"], "--each '5..3': give a number"),
        (["--each", "none"], "--each 'none': give a number"),
        (["--faults", "kil"], "no fault 'kil'"),
        (["--least", "5"], "--least 5: it is more than --nodes 4"),
        (["--script", "none.py"], "none.py: there is no such file"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    """With exit code 2, one line on standard error, and nothing on standard output."""
    script = tmp_path / "train.py"
    script.write_text("")
    result = CliRunner().invoke(app, ["random", "--script", str(script), "--json", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


FAULTS = (EtcdPause(seconds=4.0, when=A), Kill(node="node1", when=B), Join(when=B), EtcdEmpty(when=A))


def test_a_schedule_is_made_small() -> None:
    """What does not matter is left out, and what is left is made milder; nothing is tried twice."""
    tried: list[tuple[Fault, ...]] = []

    def fails(schedule: Schedule) -> bool:
        tried.append(schedule.faults)
        return any(isinstance(fault, EtcdPause) and fault.seconds >= 1 for fault in schedule.faults)

    left = smallest(Schedule(faults=FAULTS, seed=7), fails, tries=20, nodes=4)
    assert left == Schedule(faults=(EtcdPause(seconds=1.0, when=A),), seed=7)
    assert len(tried) == len(set(tried)) <= 8


def test_it_ends_after_so_many_tries_or_when_time_is_over() -> None:
    """With the smallest one until then."""
    tried: list[Schedule] = []

    def fails(schedule: Schedule) -> bool:
        tried.append(schedule)
        return True

    assert len(smallest(Schedule(faults=FAULTS), fails, tries=1, nodes=4).faults) == 2
    assert smallest(Schedule(faults=FAULTS), fails, tries=9, nodes=4, going=lambda: len(tried) < 1).faults == FAULTS
    assert len(tried) == 1


def test_what_cannot_happen_is_not_tried() -> None:
    """Here the second generation never comes without a death; a moment is made plainer."""
    first, second = Kill(node="node1", when=A), Pause(node="node2", when=When(generation=2))
    candidates: list[Schedule] = []
    smallest(Schedule(faults=(first, second)), lambda one: bool(candidates.append(one)), tries=9, nodes=4)
    assert (second,) not in [one.faults for one in candidates]
    waits = Kill(node="node1", when=When(step=5, event=SAVED))
    assert [one.faults for one in smaller(Schedule(faults=(waits,)))] == [(first,)]


def a_kept_join(folder: Path) -> None:
    """Write what is kept of a run, but for its verdict."""
    (folder / "job.json").write_text('{"script": "train.py"}')
    (folder / "schedule.toml").write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")


def test_failures_are_alike_by_the_promise_and_not_by_numbers(tmp_path: Path) -> None:
    """The judge's first one is taken, whatever its text says: a job that hangs breaks most others, too."""
    a_kept_join(tmp_path)
    for text in ("nothing happened for 180 s; node1 hangs", "nothing happened for 90 s; node2, node3 hang"):
        promises = [{"says": "all is left as it was", "broken": []}, {"says": "it goes on", "broken": [text]}]
        promises.append({"says": "the same bits", "broken": ["digest 0a, undisturbed 1b"]})
        (tmp_path / "verdict.json").write_text(json.dumps({"promises": promises}))
        assert failed(tmp_path)[2] == "it goes on"


def test_what_is_left_is_named_by_the_schedules_seed() -> None:
    """Whatever the folder is named; without a seed, as of a soak, by the folder's name."""
    folder = Path("out/failed-7.2")
    assert [number_of(folder, Schedule(faults=FAULTS, seed=seed)) for seed in (12, 0, None)] == ["12", "0", "7_2"]
    assert number_of(Path("mine"), Schedule(faults=FAULTS)) == "0"


def test_only_what_failed_is_made_small(tmp_path: Path) -> None:
    """A folder of a run that passed, or of none, is refused."""
    result = CliRunner().invoke(app, ["shrink", str(tmp_path)])
    assert (result.exit_code, "no folder of a run" in result.stderr) == (2, True)
    a_kept_join(tmp_path)
    (tmp_path / "verdict.json").write_text(json.dumps({"promises": []}))
    result = CliRunner().invoke(app, ["shrink", str(tmp_path)])
    assert (result.exit_code, "every promise held in this run" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("end", "since", "code", "early"),
    [
        (EtcdUnavailable("no endpoint answered"), 2, 4, "no endpoint answered"),
        (EtcdUnavailable("no endpoint answered"), 3, 0, ""),
        (OSError(28, "No space left on device"), 3, 4, "OSError: [Errno 28] No space left on device"),
        (SystemExit(143), 3, 143, "it was interrupted"),
    ],
    ids=["three errors", "two errors", "disk", "sigterm"],
)
def test_a_search_that_is_ended_early_leaves_the_smallest_until_then(
    end: BaseException, since: int, code: int, early: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its test, and a report that names the folder it is replayed from; errors of two tries end nothing."""
    script = tmp_path / "train.py"
    script.write_text("import elastic3d\n")
    broken = storm(setting(script), digest="other bits")
    tried: list[Schedule] = []

    def play(schedule: Schedule, job: Job, *, workdir: Path, **_: object) -> Storm:
        tried.append(schedule)
        if len(tried) >= since:
            raise end
        (workdir / "job" / "nodes").mkdir(parents=True)
        (workdir / "job" / "events").mkdir()
        return replace(broken, schedule=schedule)

    (tmp_path / "work" / "job" / "nodes").mkdir(parents=True)
    (tmp_path / "work" / "job" / "events").mkdir()
    folder = keep(broken, Job(script=str(script), seed=7), tmp_path / "out", tmp_path / "work")
    monkeypatch.setattr(shrink, "play_storm", play)
    result = CliRunner().invoke(app, ["shrink", str(folder), "--json"])
    assert result.exit_code == code, result.output
    assert result.stderr.count(": cannot be played: no endpoint answered") == 2 * isinstance(end, EtcdUnavailable)
    kept = json.loads(result.stdout)
    assert (kept["early"], kept["before"], kept["faults"]) == (early, 3, [str(one) for one in tried[since - 2].faults])
    left = tmp_path / "out" / "shrunk-7"
    assert (kept["folder"], kept["test"]) == (str(left), str(left / "test_found_7.py"))
    assert kept_storm(left)[0] == tried[since - 2]
    assert f"elastic3d chaos replay {left}" in (left / "report.html").read_text()


def test_what_is_left_is_a_test(tmp_path: Path) -> None:
    """It has the job and the schedule, whatever is in the arguments, and asks of times what the run was asked."""
    job = Job(script="/x/train.py", arguments=('--a="b"', "--steps=40"), nodes=3, conf={"lease": "5"}, patience=90.0)
    job = replace(job, bars=2.0, recovery=30.0, tolerance=1e-3)
    schedule = Schedule(faults=FAULTS, seed=7)
    text = as_test(schedule, job, name="7", promise="the same bits")
    names: dict[str, object] = {}
    exec(compile(text, "test_found_7.py", "exec"), names)
    assert names["JOB"] == job
    assert parse(tomllib.loads(str(names["SCHEDULE"])), "schedule", nodes=3) == schedule
    assert callable(names["test_found_7"])


def test_a_test_of_which_something_cannot_be_made_is_skipped(tmp_path: Path) -> None:
    """Since what holds without it proves nothing."""
    script = tmp_path / "train.py"
    script.write_text("import elastic3d\n")
    partly = storm(setting(script))
    assert partly.kept
    assert partly.skipped
    names: dict[str, object] = {}
    exec(as_test(partly.schedule, Job(script=str(script)), name="7", promise="the same bits"), names)
    names["play_storm"] = lambda *_, **__: partly
    with pytest.raises(pytest.skip.Exception, match="kill-companion node0 slot=1 @3: one slot"):
        names["test_found_7"](tmp_path)  # type: ignore[operator]
