"""Events become spans: whose, from when to when, and under which others; those of all nodes join without a word."""

from __future__ import annotations

import pytest

from elastic3d.log import EVENTS
from elastic3d.metrics.recording import Distribution, MetricRecorder
from elastic3d.telemetry import trainer_spans, verdict_spans
from elastic3d.telemetry.span import LONGEST, MOST, Trace, plain
from elastic3d.worker.processes.events import ExitKind
from tests.telemetry.histories import LOSS, STEP, Line, restored, sealed, spans_of, trainer, tree

FIRST = """\
generation 100.00 to 105.00
  beginning 100.00 to 102.00
    beginning.restore 100.00 to 101.00
    trainer.begin of rank 0 100.25 to 101.00
      trainer.begin.script of rank 0 100.25 to 100.50
      trainer.begin.loading of rank 0 100.50 to 101.00
    trainer.begin of rank 1 100.50 to 101.00
      trainer.begin.script of rank 1 100.50 to 101.00
    beginning.first_step 101.00 to 102.00
  trainer of rank 0 100.10 to 104.70
  trainer of rank 1 100.10 to 104.70 (signal 6)
  checkpoint 102.50 to 103.50
    checkpoint.write 102.30 to 102.80
    checkpoint.write 102.50 to 103.00
    checkpoint.commit 103.25 to 103.50"""

SECOND = """\
generation 104.00 to 109.00
  recovery 104.00 to 107.00
    recovery.notice 104.00 to 104.50
    recovery.seal 104.50 to 105.00
    recovery.restore 105.00 to 106.00
    trainer.begin of rank 0 105.25 to 106.00
      trainer.begin.script of rank 0 105.25 to 105.50
      trainer.begin.awaiting of rank 0 105.50 to 105.75
      trainer.begin.loading of rank 0 105.75 to 106.00
    trainer.begin of rank 1 105.50 to 106.50
      trainer.begin.script of rank 1 105.50 to 105.75
      trainer.begin.loading of rank 1 105.75 to 106.50
    recovery.first_step 106.00 to 107.00"""


def test_a_recovery_is_one_trace_with_the_parts_of_both_nodes() -> None:
    """The ids of what they share are made of the run and the generation; every parent is there, and sent once."""
    spans = [span for node, lines in LOSS.items() for span in spans_of("run", node, lines, end=109.0)]
    first, second = Trace(run="run", generation=1), Trace(run="run", generation=2)
    assert {span.trace for span in spans} == {first.id, second.id}
    assert len({span.id for span in spans}) == len(spans)
    assert tree([span for span in spans if span.trace == first.id]) == FIRST
    assert tree([span for span in spans if span.trace == second.id]) == SECOND


def test_spans_are_the_same_whenever_they_are_made() -> None:
    """Nothing is drawn; another run, another generation and another life have other ids."""
    assert spans_of("run", "a", LOSS["a"]) == spans_of("run", "a", LOSS["a"])
    ids = {Trace(run=run, generation=number).id for run in ("r", "s", "r\0", "") for number in range(1, 9)}
    assert len(ids) == 32
    assert {len(id) for id in ids} == {16}
    spans = {Trace(run="r", generation=1).span(*words) for words in (("ab",), ("a", "b"), ("a", ""), ("", "a"), ("a",))}
    assert len(spans) == 5


def test_a_recovery_takes_as_long_as_its_metric_says() -> None:
    """Both are made of the same events."""
    recorder = MetricRecorder("a")
    for at, event, fields in LOSS["a"]:
        if isinstance(fields, int):
            recorder.observe("step.committed", {"rank": 0, "step": int(at), "samples": [0, 1]}, at)
            recorder.stepped(int(at), at, first=True)
        else:
            recorder.observe(event, fields, at)
    totals = {one.labels: one.value for one in recorder.values() if one.name == "elastic3d_recovery_duration_seconds"}
    (span,) = [span for span in spans_of("run", "a", LOSS["a"]) if span.name == "recovery"]
    total = totals[("loss",)]
    assert isinstance(total, Distribution)
    assert total.sum == pytest.approx(span.end - span.start) == 3.0
    assert span.attributes["elastic3d.kind"] == "loss"


def test_a_generation_without_a_step_is_told_as_one() -> None:
    """What hangs under its beginning has its parent, and the recovery goes on in the next one."""
    lines = [
        *LOSS["a"][:12],
        (106.0, "peer.lost", {"peer": "b", "evidence": "refuses"}),
        (106.2, "trainer.exited", trainer(2, 0, kind="stopped", step=-1)),
        (107.0, "generation.sealed", sealed(3, "a", cause="death")),
        (108.0, "state.restored", restored(3, 0, loading=0.5)),
        (109.0, STEP, 3),
    ]
    spans = spans_of("run", "a", lines, end=110.0)
    second = tree([span for span in spans if span.trace == Trace(run="run", generation=2).id])
    assert second.startswith(
        "generation 104.00 to 107.00\n  recovery 104.00 to 107.00 (the generation ended before its first step)\n"
    )
    third = tree([span for span in spans if span.trace == Trace(run="run", generation=3).id])
    assert third.splitlines()[:2] == ["generation 104.00 to 110.00", "  recovery 104.00 to 109.00"]
    outcomes = [span.attributes["elastic3d.outcome"] for span in spans if span.name == "generation"]
    assert outcomes == ["over", "superseded", "over"]


def test_the_time_in_which_a_node_stands_aside_is_in_no_span() -> None:
    """Others made steps for five hours, which it did not hear of; then it has rank 0, and begins twice."""
    lines: list[Line] = [
        *LOSS["a"][:7],
        (104.5, "generation.sealed", sealed(2, "bc", leader="b", cause="link")),
        (9000.0, "peer.lost", {"peer": "d", "evidence": "refuses"}),
        (18000.0, "generation.sealed", sealed(3, "ab", cause="death")),
        (18001.0, "generation.sealed", sealed(4, "a", cause="death")),
        (18002.0, "state.restored", restored(4, 0, loading=0.5)),
        (18003.0, STEP, 4),
    ]
    spans = spans_of("run", "a", lines, end=18010.0)
    last = tree([span for span in spans if span.trace == Trace(run="run", generation=4).id])
    assert last.splitlines()[:3] == [
        "generation 18000.00 to 18010.00",
        "  beginning 18000.00 to 18003.00",
        "    beginning.seal 18000.00 to 18001.00",
    ]
    assert all(span.end - span.start < 60 for span in spans if span.start > 104.5)


def test_a_generation_is_sent_by_one_node_whoever_leads() -> None:
    """By the next one's leader, else by the first of its nodes that was there."""
    for leader, nodes, teller in (("b", "ab", "b"), ("d", "dab", "a"), ("d", "db", "b")):
        sent = []
        for node in "ab":
            lines = [
                (1.0, "generation.sealed", sealed(1, "abc")),
                (2.0, "generation.sealed", sealed(2, nodes, leader=leader, cause="join")),
            ]
            sent += [node for span in spans_of("r", node, lines) if span.name == "generation"]
        assert sent == [teller]


def test_a_step_that_is_heard_late_begins_nothing() -> None:
    """It was made in the generation before; the recovery waits for one of the next."""
    lines = [*LOSS["a"][:11], (105.05, STEP, 1), *LOSS["a"][11:]]
    assert tree([s for s in spans_of("run", "a", lines) if s.name.startswith("recovery")]) == tree(
        [s for s in spans_of("run", "a", LOSS["a"]) if s.name.startswith("recovery")]
    )


def test_a_standstill_and_its_verdict_last_as_long_as_the_silence() -> None:
    """One that is not over when its generation ends says so; the ranks' parts are children of what they led to."""
    lines = [
        (100.0, "generation.sealed", sealed(1, "ab")),
        (130.0, "rank.suspected", {"generation": 1, "rank": 0, "seconds": 20.0, "phase": "backward", "detail": "f"}),
        (131.0, "rank.suspected", {"generation": 1, "rank": 1, "seconds": 1.0, "phase": "data"}),
        (132.0, "rank.recovered", {"generation": 1, "rank": 1}),
        (
            133.0,
            "audit.failed",
            {
                "generation": 1,
                "rank": 0,
                "finding": "persistent",
                "nodes": ["b"],
                "ranks": [1],
                "step": 7,
                "seconds": 0.75,
                "parts": [0.5, 0.25],
            },
        ),
        (134.0, "node.lying", {"generation": 1, "rank": 0, "nodes": ["b"], "ranks": [1], "clean": -1, "step": 7}),
        (134.5, "node.slow", {"generation": 1, "rank": 0, "nodes": ["b"], "seconds": 21.0, "step": 9}),
        (134.6, "vote.split", {"generation": 1, "rank": 0, "nodes": [], "step": 9}),
        (
            135.0,
            "rank.stuck",
            {"generation": 1, "fault": "lock", "ranks": [0], "nodes": ["a"], "act": True, "silent": [25.0, 26.5]},
        ),
        (136.0, "generation.sealed", sealed(2, "a", cause="stuck")),
    ]
    spans = spans_of("run", "a", lines)
    shown = tree([span for span in spans if span.trace == Trace(run="run", generation=1).id]).splitlines()
    assert shown[2:] == [
        "  verdict 108.50 to 135.00",
        "    verdict.silence of rank 1 108.50 to 135.00",
        "    verdict.silence of rank 0 110.00 to 135.00",
        "  rank.silent of rank 0 110.00 to 136.00 (it did not move again)",
        "  verdict of rank 0 113.50 to 134.50",
        "  rank.silent of rank 1 130.00 to 132.00",
        "  verdict of rank 0 132.25 to 134.00",
        "  hearing of rank 0 132.25 to 133.00",
        "    hearing.repeat of rank 0 132.25 to 132.75",
        "    hearing.repeat of rank 1 132.25 to 132.50",
        "  verdict of rank 0 134.60 to 134.60",
    ]
    (stuck,) = [span for span in spans if span.attributes.get("elastic3d.event") == "rank.stuck"]
    assert stuck.attributes["elastic3d.nodes"] == ["a"]
    assert stuck.attributes["elastic3d.act"] is True


def test_a_save_that_is_given_up_is_sent_by_the_node_that_commits_a_later_one() -> None:
    """What was written for it has its parent; another node's commit of the same save is none of its own."""

    def write(step: int, at: float) -> Line:
        return (at, "checkpoint.written", {"step": step, "made_in": 1, "bytes": 1, "new": 1, "seconds": 0.5, "slot": 0})

    def commit(step: int, at: float, *, moved: bool = True) -> Line:
        return (at, "checkpoint.committed", {"step": step, "made_in": 1, "moved": moved, "seconds": 0.25})

    lines = [
        (100.0, "generation.sealed", sealed(1, "ab")),
        write(5, 101.0),
        write(6, 102.0),
        (103.0, "generation.sealed", sealed(2, "a")),
        commit(6, 104.0),
        write(7, 105.0),
        commit(7, 106.0, moved=False),
    ]
    spans = spans_of("run", "a", lines)
    shown = tree([span for span in spans if span.trace == Trace(run="run", generation=1).id]).splitlines()
    assert shown[2:] == [
        "  checkpoint 100.50 to 104.00 (it was given up for step 6)",
        "    checkpoint.write 100.50 to 101.00",
        "  checkpoint 101.50 to 104.00",
        "    checkpoint.write 101.50 to 102.00",
        "    checkpoint.commit 103.75 to 104.00",
        "? checkpoint.write",
    ]


def test_a_clock_that_is_set_back_makes_no_span_of_less_than_no_time() -> None:
    """Each still ends where it was seen to end."""
    lines = [(at - 3.0 * (number > 7), event, fields) for number, (at, event, fields) in enumerate(LOSS["a"])]
    assert all(span.start <= span.end for span in spans_of("run", "a", lines, end=50.0))


def test_attributes_are_plain_and_bounded() -> None:
    """What is not known is left out; a list of one kind stays a list; anything else is text."""
    long = "x" * 9 * LONGEST
    made = plain(
        {"a": None, "b": "", "c": [], "d": False, "e": 0, "f": ["x", "y"], "g": list(range(2 * MOST)), "h": [[1, 2]],
         "i": long, "j": {"p": 1}, "k": 1 << 80, "l": [1, "x"], "m": float("nan")}
    )  # fmt: skip
    assert not {"elastic3d.a", "elastic3d.b", "elastic3d.c"} & made.keys()
    assert (made["elastic3d.d"], made["elastic3d.e"], made["elastic3d.f"]) == (False, 0, ["x", "y"])
    assert len(made["elastic3d.g"]) == MOST  # type: ignore[arg-type]
    assert (made["elastic3d.h"], made["elastic3d.k"]) == ("[[1, 2]]", str(1 << 80))
    assert len(made["elastic3d.i"]) == LONGEST  # type: ignore[arg-type]


def test_spans_are_made_of_events_that_there_are() -> None:
    """A name that is misspelt here would never be heard."""
    assert {*verdict_spans.HEARINGS, *verdict_spans.VERDICTS} <= EVENTS.keys()
    assert {*trainer_spans.FAILED} <= {str(kind) for kind in ExitKind}
    wanted = {"checkpoint.written": ("step", "made_in", "bytes", "new", "seconds"), "checkpoint.verified": ("seconds",)}
    for name, fields in wanted.items():
        assert {*fields} <= {*EVENTS[name].fields}
