"""The report of a run, from what its nodes wrote."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.accounting.spans import Category, Span
from elastic3d.health.past_verdicts import PastVerdict
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.report.document import RunEnding, RunReport
from elastic3d.report.page import page
from elastic3d.report.shares import COLUMNS, bands
from elastic3d.values import to_json
from tests.accounting.test_any_events import files
from tests.accounting.written import Written, started
from tests.pages.parsed import parsed
from tests.report.reporting import WRITTEN, a_failure, reported


def made(written: Written) -> RunReport:
    """Return the report of what was written."""
    written.sort()
    return reported({node: [json.dumps(line) for line in lines] for node, lines in written.lines.items()})


def test_a_failure_is_told_from_its_cause_to_the_first_step_after_it() -> None:
    """What the death cost, in parts, from where the state came, and which steps were lost to it."""
    report = made(a_failure())
    first, second = report.generations
    assert (first.cause, first.first_step, first.last_step, first.steps_lost) == ("start", 1, 10, 3)
    assert (second.cause, second.left, second.layout) == ("death", ("b",), "pp 1 x dp 1 x tp 1, ZeRO-3")
    assert (second.sealed, second.first_step, second.steps_lost) == (15_000_000, 8, 0)
    recovery = report.recoveries[-1]
    assert (recovery.generation, recovery.node, recovery.state) == (2, "a", "memory")
    parts = [(str(part.category), part.microseconds) for part in recovery.parts]
    assert sum(length for _, length in parts) <= recovery.microseconds
    assert {"noticing", "forming", "preparing", "restoring"} <= {name for name, _ in parts}
    assert (report.ending, report.account.steps) == (RunEnding.DONE, 12)
    assert report.summary == (
        "12 steps in 23 s on 2 nodes, in 2 generations; it came to its end; "
        f"{100 * report.account.goodput:.0f} % of the nodes' time went to steps that count"
    )


def test_curves_have_each_step_that_counts_once() -> None:
    """Lost steps are in neither; what was made is spread over the time that it took."""
    report = made(a_failure())
    assert [point.step for point in report.curve] == list(range(1, 13))
    assert [point.generation for point in report.curve] == [1] * 7 + [2] * 5
    assert report.throughput_unit == "samples"
    width = report.account.microseconds / len(report.throughput) / 1e6
    assert sum(point.per_second for point in report.throughput) * width == pytest.approx(12 * 8, rel=0.01)
    assert all(point.per_second == 0 for point in report.throughput if 10.1e6 < point.at < 16.9e6)


def test_checkpoints_are_known_by_all_who_wrote_a_part() -> None:
    """With their bytes, how much was read back, and what failed, however often it was said."""
    report = made(a_failure())
    saved, lost = report.checkpoints
    assert (saved.step, saved.nodes, saved.bytes, saved.new, saved.seconds) == (5, 2, 200, 100, 0.25)
    assert (saved.committed, saved.generation, saved.verified, saved.vetted) == (8_500_000, 1, "sample", False)
    assert (lost.step, lost.committed, lost.generation) == (10, None, 2)
    (trouble,) = report.troubles
    assert (trouble.event, trouble.step, trouble.nodes, trouble.error, trouble.times) == (
        "checkpoint.failed",
        10,
        ("a",),
        "no space left",
        2,
    )


def test_how_a_run_ended_is_what_its_last_nodes_wrote() -> None:
    """A node that left before says nothing of it, and of one that was killed nothing is known."""
    open_one = started(["a", "b"])
    open_one.steps(1, 3, 3.0, 1, "a")
    open_one.say("c", 2, "node.started")
    open_one.say("c", 4, "job.ended", kind="done")
    assert made(open_one).ending is RunEnding.OPEN
    assert "no node wrote that it ended" in made(open_one).summary
    failed = started(["a", "b"])
    failed.steps(1, 3, 3.0, 1, "a")
    failed.say("a", 7, "job.ended", kind="error", error="ValueError: no")
    failed.say("b", 7, "job.ended", kind="done")
    report = made(failed)
    assert (report.ending, report.error) == (RunEnding.FAILED, "ValueError: no")


def test_what_was_found_is_told_once_with_its_evidence() -> None:
    """A bundle tells more than the leader's event about the same; without one, the event is explained."""
    written = a_failure()
    stuck = {"fault": "stopped", "ranks": [1], "nodes": ["b"], "step": 10, "act": True, "confidence": 0.9, "waits": []}
    written.say("a", 14.2, "rank.stuck", generation=1, detail="rank 1 of b is stopped", **stuck)
    written.say("a", 14.3, "rank.stuck", generation=1, detail=3, step="x")
    told_by_event = made(written).findings
    assert [finding.generation for finding in told_by_event] == [1]
    assert "Generation 1 stood still after step 10: stopped" in told_by_event[0].text
    verdict = Verdict(kind=VerdictKind.STUCK, fault="stopped", key="1.0", step=10, detail="rank 1 is stopped")
    bundle = PastVerdict(verdict=verdict, evidence=("evidence/1.0-10-stuck-b",))
    lines = {node: [json.dumps(line) for line in mine] for node, mine in written.lines.items()}
    told_by_bundle = reported(lines, bundles=[bundle]).findings
    assert len(told_by_bundle) == 1
    assert "Evidence   evidence/1.0-10-stuck-b" in told_by_bundle[0].text


def test_many_spans_become_bands_that_cover_the_same_time() -> None:
    """A band says what most of its time was; nothing is missing between the first and the last."""
    kinds = (Category.USEFUL, Category.DATA, Category.SAVING)
    spans, at = [], 1000
    for number in range(5000):
        length = 90 if number % 3 == 0 else 5
        spans.append(Span(at, at + length, kinds[number % 3]))
        at += length
    merged = bands(spans, 1000, at)
    assert len(merged) <= COLUMNS
    assert (merged[0].start, merged[-1].stop) == (0, at - 1000)
    assert all(one.stop == after.start for one, after in pairwise(merged))
    assert {band.category for band in merged} == {Category.USEFUL}
    assert [band.category for band in bands(spans[:3], 1000, 1100)] == list(kinds)


@given(files)
@settings(max_examples=60)
def test_whatever_files_say_makes_a_report_and_a_page(lines: dict[str, list[str]]) -> None:
    """Plain JSON without NaN, and HTML that is well formed."""
    report = reported(lines)
    json.dumps(to_json(report), allow_nan=False)
    parsed(page(report, written=WRITTEN))
    for timeline in report.timelines:
        assert all(0 <= one.start < one.stop for one in timeline.bands)
    assert all(0 <= point.per_second < 1e18 for point in report.throughput)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 400)), min_size=601, max_size=900), st.integers(0, 9))
@settings(max_examples=30)
def test_bands_lie_within_the_run_and_in_order(parts: list[tuple[int, int]], before: int) -> None:
    """Whatever the lengths: whole microseconds, none empty, none beyond the node's own time."""
    spans, at = [], before
    for kind, length in parts:
        spans.append(Span(at, at + length, list(Category)[kind % len(Category)]))
        at += length
    merged = bands(spans, 0, at + 7)
    assert (merged[0].start, merged[-1].stop) == (before, at)
    assert all(one.start < one.stop for one in merged)
    assert all(one.stop == after.start for one, after in pairwise(merged))
