"""The report of a run: what a page tells is what happened, and nothing that is put into it breaks it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.faults.etcd import EtcdPause
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.faults.process import Kill, KillCompanion
from chaos.history.follow import Injection, picture
from chaos.judging.notices import notices
from chaos.judging.oracle import judge
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting
from chaos.report.facts import Fate, FaultFact, Points, Role, RunFacts, facts
from chaos.report.folder import kept_facts
from chaos.report.moments import moments
from chaos.report.page import page, sentence
from chaos.report.plot import loss_curves
from chaos.report.timeline import rows, timeline
from elastic3d.errors import UsageError
from elastic3d.values import from_json, to_json
from tests.chaos.made_up_events import BATCH, a_death_and_a_join, event, sealed, step
from tests.chaos.pages import Page

KILL, JOIN = Kill(node="leader", when=When(step=3)), Join(when=When(event="peer.lost"))
PAUSE, SLOT = EtcdPause(seconds=2.0, when=When(step=4)), KillCompanion(node="node0", when=When(step=3))
EVIL = '<script>alert("1")</script>'


def told(*, digest: str = "abc", script: str = "train.py", logs: dict[str, str] | None = None) -> RunFacts:
    """Return what is to be told of six steps: node1 is killed, node4 let in, etcd paused, one fault skipped."""
    events = sorted(
        [
            *a_death_and_a_join(),
            *(event("etcd.lost", 13.2 + number / 10, node=f"node{number}", error="no answer") for number in (0, 2)),
            event("checkpoint.committed", 13.45, node="node3", step=4, moved=True),
            event("rank.stuck", 13.1, nodes=["node1"], ranks=[1], fault="stopped", act=True, detail="it stands still"),
            event("job.ended", 15.0, node="node0", kind="done", error=None),
        ],
        key=lambda one: one.at,
    )
    calm = [sealed(1, 0.0, "start", ["node0"]), *(step(n, float(n), 1) for n in range(1, 7))]
    quiet = Outcome(
        setting=Setting(nodes=4, steps=6, global_batch=BATCH),
        faults=(),
        picture=picture(calm),
        digest="abc",
        exit_codes={},
        killed=(),
        undone=(),
        leftovers=(),
    )
    faults: tuple[Fault, ...] = (KILL, JOIN, PAUSE, SLOT)
    done = (Injection(kind="kill", node="node1", at=12.0), Injection(kind="join", node="node4", at=13.0))
    outcome = replace(
        quiet,
        faults=faults[:3],
        picture=picture(events, done, started_at=4.0),
        digest=digest,
        exit_codes={"node0": 0, "node1": -9},
        killed=("node1",),
        injections=done,
        made=((KILL, 12.0), (JOIN, 13.0), (PAUSE, 13.15)),
        hit=("node1", "node4", ""),
        logs=logs or {},
    )
    return facts(
        outcome,
        judge(outcome, quiet, all_known=True),
        events,
        script=script,
        arguments=("--seed={seed}",),
        faults=faults,
        skipped=((SLOT, "one slot"),),
        noticed=tuple(notices(outcome, events)),
        quiet=Points(steps=(1, 2), losses=((4.9).hex(), (4.8).hex())),
    )


def test_facts_are_those_of_the_events() -> None:
    """Faults with whom they hit and who noticed; nodes by generation; what was said, of several nodes once."""
    run = told()
    kill, join, pause, slot = run.faults
    assert (kill.node, kill.at, kill.detector, kill.noticed) == ("node1", 12.0, "peer.lost", pytest.approx(0.05))
    assert kill.next_step == pytest.approx(1.0)
    assert (join.node, pause.node, pause.noticed) == ("node4", "", pytest.approx(0.05))
    assert (slot.fate, slot.why, slot.at) == (Fate.SKIPPED, "one slot", None)
    lives = [
        (span.generation, span.role, span.begin, span.end) for span in run.spans if span.node in ("node1", "node4")
    ]
    assert lives == [
        (1, Role.ACTIVE, 10.0, 12.0),
        (3, Role.COMING, 13.5, 13.9),
        (3, Role.ACTIVE, 13.9, 15.0),
    ]
    assert [(one.number, one.counts) for one in run.made][2:4] == [(3, False), (3, True)]
    (lost,) = [one for one in run.moments if one.name == "etcd.lost"]
    assert (lost.by, lost.nodes) == (("node0", "node2"), ())
    assert (run.began, run.ended, run.origin) == (4.0, 15.0, 10.0)
    assert from_json(RunFacts, json.loads(json.dumps(to_json(run)))) == run


def test_what_is_no_news_is_no_moment() -> None:
    """Trainers that leave in order, steps, and checkpoints that are only written."""
    quiet = [
        event("trainer.exited", 1.0, kind="left", step=1, error=None),
        event("checkpoint.written", 2.0, step=1, bytes=1, new=1),
        step(1, 3.0, 1),
    ]
    assert moments(quiet) == ()
    crash = event("trainer.exited", 4.0, kind="crash", step=1, error="signal 9")
    assert [(one.detail, one.nodes) for one in moments([crash])] == [("crash: signal 9", ("node0",))]


def test_equal_faults_are_told_one_by_one() -> None:
    """Each of two equal joins has its own time; a fault whose moment never came is told as such."""
    run = told()
    twice = facts(
        Outcome(
            setting=Setting(steps=6),
            faults=(JOIN, JOIN, KILL),
            picture=picture([]),
            digest=None,
            exit_codes={},
            killed=(),
            undone=(KILL,),
            leftovers=(),
            made=((JOIN, 1.0), (JOIN, 2.0)),
            hit=("node4", "node5"),
        ),
        judge(Outcome(**{**_empty(), "undone": (KILL,)})),
        [],
        script="x.py",
        arguments=(),
        faults=(JOIN, JOIN, KILL),
        skipped=(),
        noticed=(),
    )
    assert [(one.node, one.at, one.fate) for one in twice.faults] == [
        ("node4", 1.0, Fate.MADE),
        ("node5", 2.0, Fate.MADE),
        ("", None, Fate.MISSED),
    ]
    assert "its moment never came" in Page(page(twice, "out/failed-1")).words
    assert rows(run) == ("node0", "node1", "node2", "node3", "node4")


def _empty() -> dict[str, object]:
    return {
        "setting": Setting(steps=6),
        "faults": (),
        "picture": picture([]),
        "digest": None,
        "exit_codes": {},
        "killed": (),
        "leftovers": (),
    }


def test_the_page_tells_the_run() -> None:
    """The verdict in a sentence, what replays it, each fault with its bar, each generation, each promise."""
    run = told()
    words = Page(page(run, "out/my run")).words
    assert sentence(run) == (
        "Every promise held, as far as it was tried: after 3 faults the job ended with the bits of a run that nothing "
        "happened to; 1 fault skipped."
    )
    for part in (
        sentence(run),
        "elastic3d chaos replay 'out/my run'",
        "kill leader@3",
        "after 0.05 s of 5 s",
        "docs/reference/failures.md: a node dies, or one of its keepers",
        "skipped one slot",
        "pause etcd for 2 s @4: it lasts for real seconds",
        "generation 2: 1.0 s from what led to it (death) to step 3",
        "3 join",
        "node0, node2, node3, node4",
        "every sample is consumed once",
        "96 samples, none missing, none repeated",
        "rank.stuck of node1",
        "checkpoint of step 4, committed by node3",
    ):
        assert part in words, part


def test_a_broken_promise_comes_first() -> None:
    """With what was promised, by which page, and what was seen."""
    run = told(digest="abd", logs={"node2": "Traceback"})
    words = Page(page(run, "out/failed-17")).words
    assert words.index("A promise was broken: whatever happens, the bits are those of") < words.index("digest abd")
    assert "broken whatever happens, the bits are those of a run that nothing happens to docs/explanation/same" in words
    assert "Traceback" in words
    assert "held in this run" not in words


def test_a_skipped_fault_is_no_fault_that_held() -> None:
    """The last cell of its row says that it was skipped, and nothing else."""
    text = page(told(), "out/passed-17")
    row = next(row for row in text.split("<tr>") if "kill-companion node0 slot=1 @3" in row)
    assert "skipped" in row
    assert "held" not in row


def test_nothing_that_is_put_into_a_page_is_run(tmp_path: Path) -> None:
    """A script, a log, a node, a folder with a tag in it are shown as they are; nothing is loaded from elsewhere."""
    run = told(script=f"/x/{EVIL}.py", logs={f"node0{EVIL}": f"said {EVIL}"})
    run = replace(
        run,
        generations=tuple(replace(one, cause=EVIL, detail=EVIL, nodes=(EVIL,)) for one in run.generations),
        moments=tuple(replace(one, detail=EVIL, by=(EVIL,)) for one in run.moments),
        spans=tuple(replace(one, node=EVIL) for one in run.spans),
        promises=tuple(replace(one, seen=EVIL) for one in run.promises),
        faults=tuple(replace(one, why=EVIL, text=EVIL) for one in run.faults),
    )
    text = page(run, f"out/{EVIL}")
    read = Page(text)
    assert "script" not in read.tags
    assert read.links == []
    assert "url(" not in text
    assert "@import" not in text
    assert EVIL in read.words
    assert EVIL not in text


def test_a_picture_is_drawn_for_its_width() -> None:
    """Everything is within it, on a desk and in a hand; equal moments do not cover each other."""
    run = told()
    crowded = replace(run, faults=tuple(replace(run.faults[0], number=number) for number in range(1, 6)))
    for width in (1080, 376):
        text = timeline(crowded, width)
        assert Page(text).tags.count("svg") == 1
        numbers = [float(x) for x in re.findall(r' (?:x|x1|x2|cx)="([\d.-]+)"', text)]
        assert min(numbers) >= 0
        assert max(numbers) <= width
        faults = re.findall(r'<circle cx="([\d.]+)" cy="[\d.]+" r="9" class="fault"', text)
        assert len(set(faults)) == 5


def test_a_run_without_a_step_has_a_page_too() -> None:
    """A job that was given up before its first generation."""
    bare = facts(
        Outcome(**{**_empty(), "undone": ()}),
        judge(Outcome(**{**_empty(), "undone": ()})),
        [],
        script="x.py",
        arguments=(),
        faults=(),
        skipped=(),
        noticed=(),
    )
    assert "promises were broken" in Page(page(bare, "out/failed-1")).words


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_the_others_where_they_are(loss: float) -> None:
    """Of a job that has diverged what it made before is still drawn."""
    finite = [(1, 2.0), (2, 1.0)]
    assert loss_curves([*finite, (3, loss)], (), [*finite, (3, loss)]) == loss_curves(finite, (), finite)


def test_a_late_notice_is_shown_as_late_and_fails_nothing() -> None:
    """The bar is for people: machines differ."""
    run = told()

    def late(fault: FaultFact) -> FaultFact:
        return replace(fault, noticed=7.25) if fault.number == 1 else fault

    words = Page(page(replace(run, faults=tuple(map(late, run.faults))), "out")).words
    assert "after 7.25 s of 5 s: late" in words
    assert "Every promise held" in words


def test_a_report_is_made_anew_from_its_folder(tmp_path: Path) -> None:
    """From what is kept there alone; a folder without it, or with something else, is refused by name."""
    (tmp_path / "picture.json").write_text(json.dumps(to_json(told())))
    made = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert made.exit_code == 0
    assert made.stdout.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page(told(), str(tmp_path))
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "none")])
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "no report can be made of it: picture.json" in missing.stderr
    for text, why in (("[", "no picture of a run"), ("{}", "no picture of a run")):
        (tmp_path / "picture.json").write_text(text)
        with pytest.raises(UsageError, match=why):
            kept_facts(tmp_path)
    (tmp_path / "picture.json").write_text(json.dumps({**to_json(told()), "schema": 2}))
    with pytest.raises(UsageError, match="its schema is 2"):
        kept_facts(tmp_path)
