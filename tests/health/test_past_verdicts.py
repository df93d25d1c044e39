"""Verdicts that a run left: bundles of evidence and leaders' events, of which nothing is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elastic3d.cli import application
from elastic3d.health import past_verdicts
from elastic3d.health.evidence import STALLS, VERDICT
from elastic3d.health.past_verdicts import event_verdict, read_bundles
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.values import to_json

STUCK: dict[str, Any] = {
    "generation": 3,
    "fault": "stopped",
    "step": 7,
    "ranks": [0],
    "nodes": ["n0"],
    "act": True,
    "confidence": 0.9,
    "detail": "rank 0 of n0 is stopped",
    "waits": ["rank 1 waits for rank 0"],
}


def bundle(folder: Path, key: str, node: str = "n0") -> Path:
    """Write a bundle, and return its folder."""
    path = folder / "evidence" / f"{key}-7-stuck-{node}"
    path.mkdir(parents=True)
    verdict = Verdict(kind=VerdictKind.STUCK, fault="stopped", key=key, step=7, detail="rank 0 is stopped")
    (path / VERDICT).write_text(json.dumps({"schema": 1, **to_json(verdict)}))
    return path


def test_the_leaders_event_tells_the_same_as_the_verdict_that_it_was_written_of() -> None:
    """But for the attempt, and the ids of the nodes, of which it has the names."""
    assert event_verdict("rank.stuck", STUCK) == Verdict(
        kind=VerdictKind.STUCK,
        fault="stopped",
        key="3",
        step=7,
        detail="rank 0 of n0 is stopped",
        culprits=("n0",),
        ranks=(0,),
        confidence=0.9,
        waits=("rank 1 waits for rank 0",),
    )
    stalled = event_verdict("training.stalled", {**STUCK, "ranks": None, "nodes": None, "act": None})
    assert stalled is not None
    assert (stalled.culprits, stalled.ranks, stalled.act) == ((), (), False)


@pytest.mark.parametrize("name", past_verdicts.EVENTS_OF_VERDICTS)
@pytest.mark.parametrize("wrong", [None, "x", 3, [], {}, [[]], float("nan"), True])
def test_events_with_other_fields_than_elastic3d_writes_tell_nothing(name: str, wrong: object) -> None:
    """Neither an error nor half a verdict."""
    assert event_verdict(name, {}) is None
    for field in STUCK:
        event_verdict(name, {**STUCK, field: wrong})
    assert event_verdict(name, {**STUCK, "step": "x", "detail": wrong}) is None
    assert event_verdict("step.committed", STUCK) is None


def test_bundles_are_read_in_the_order_of_their_generations(tmp_path: Path) -> None:
    """With the folders of all nodes that keep evidence of the same; 10 comes after 9."""
    for key in ("10.0", "9.1", "9.0"):
        bundle(tmp_path, key)
    (tmp_path / "evidence" / "9.1-7-stuck-n1").mkdir()
    read, problems = read_bundles(tmp_path)
    assert problems == ()
    assert [one.verdict.key for one in read] == ["9.0", "9.1", "10.0"]
    assert [Path(path).name for path in read[1].evidence] == ["9.1-7-stuck-n0", "9.1-7-stuck-n1"]
    assert read_bundles(tmp_path / "nowhere") == ((), ())


def test_what_cannot_be_read_is_named_and_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, a key that is none, a file that is too large, and more bundles than are read."""
    for number in range(4):
        bundle(tmp_path, f"{number}.0")
    evidence = tmp_path / "evidence"
    (evidence / "1.0-7-stuck-n0" / VERDICT).write_text("[" * 100_000)
    (evidence / "2.0-7-stuck-n0" / VERDICT).write_text((evidence / "3.0-7-stuck-n0" / VERDICT).read_text() + " " * 500)
    (evidence / "3.0-7-stuck-n0" / STALLS).write_text('{"stalls": []}')
    monkeypatch.setattr(past_verdicts, "LARGEST", 600)
    monkeypatch.setattr(past_verdicts, "BUNDLES", 3)
    read, problems = read_bundles(tmp_path)
    assert [one.verdict.key for one in read] == ["3.0"]
    assert len(problems) == 4
    for part in ("1 older bundles", "1.0-7-stuck-n0", "2.0-7-stuck-n0", "does not say what ranks were at"):
        assert any(part in problem for problem in problems), (part, problems)


def test_explain_tells_of_a_rank_that_stood_still_by_the_event_alone(tmp_path: Path) -> None:
    """Where the bundle of evidence is lost with its node's disk."""
    (tmp_path / "n1-0.jsonl").write_text(json.dumps({**STUCK, "event": "rank.stuck", "at": 1.0, "node": "n1"}) + "\n")
    shown = CliRunner().invoke(application(), ["explain", "--events", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("Generation 3 stood still after step 7: stopped")
    assert "node n0 (rank 0)" in shown.stdout
