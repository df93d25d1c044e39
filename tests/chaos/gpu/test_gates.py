"""What the gates make of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.gpu import gates
from chaos.gpu.__main__ import main
from chaos.gpu.gates import Verdict


def line(figure: str, value: Any, device: str = "cuda", **detail: Any) -> dict[str, Any]:
    return {"stage": "P6", "figure": figure, "value": value, "device": device, **detail}


def digest(value: str, case: str, group: str = "steps", device: str = "cuda") -> dict[str, Any]:
    return line("digest", value, device, group=group, case=case)


def verdict(name: str, *lines: dict[str, Any]) -> gates.Gate:
    (gate,) = [gate for gate in gates.judge(lines) if gate.name == name]
    return gate


def test_without_figures_nothing_is_measured() -> None:
    """No gate passes by default."""
    assert {gate.verdict for gate in gates.judge([])} == {Verdict.NOT_MEASURED}


def test_digests_are_compared_within_their_group() -> None:
    """On any device; a group of one proves nothing."""
    assert verdict("equal bits", digest("a", "one")).verdict is Verdict.NOT_MEASURED
    assert verdict("equal bits", digest("a", "one", device="cpu"), digest("a", "two")).verdict is Verdict.PASS
    both = [digest("a", "one"), digest("a", "two"), digest("b", "one", "start"), digest("b", "two", "start")]
    assert verdict("equal bits", *both).evidence == "4 digests in 2 groups"


def test_the_digest_that_differs_is_named() -> None:
    """What most of a group say is taken for the group's."""
    gate = verdict("equal bits", digest("b", "odd"), digest("a", "one"), digest("a", "two"))
    assert (gate.verdict, gate.evidence) == (Verdict.FAIL, "differ: P6 steps: odd")


def test_a_digest_that_failed_fails_the_gate() -> None:
    """A world that died proves nothing about its bits."""
    failed = {"stage": "P6", "figure": "digest", "error": "died", "case": "three", "device": "cuda"}
    assert verdict("equal bits", digest("a", "one"), digest("a", "two"), failed).evidence == "no digest of: P6 three"


@pytest.mark.parametrize(
    ("name", "figure", "good", "bad"),
    [
        ("memory back after reaping", "memory_back", 2.0, 2.1),
        ("snapshots copied", "snapshot_copy", 25.0, 24.9),
        ("slowdown of training while one is copied", "snapshot_slowdown", 3.0, 3.1),
        ("stall of the vote, in a step of 200 ms", "vote_stall", 4.0, 4.1),
    ],
)
def test_the_worst_figure_decides(name: str, figure: str, good: float, bad: float) -> None:
    """At its bound a figure passes; one of the CPU is no figure of a GPU."""
    assert verdict(name, line(figure, good)).verdict is Verdict.PASS
    assert verdict(name, line(figure, bad), line(figure, good)).verdict is Verdict.FAIL
    assert verdict(name, line(figure, good), line(figure, bad)).verdict is Verdict.FAIL
    assert verdict(name, line(figure, good, device="cpu")).verdict is Verdict.NOT_MEASURED


def test_enough_generations_without_running_out() -> None:
    """Over all jobs together; one that ran out fails, however few there were."""
    name = "no generation out of memory"
    assert verdict(name, line("generations", 19), line("out_of_memory", 0)).verdict is Verdict.NOT_MEASURED
    assert verdict(name, line("generations", 16), line("generations", 4)).verdict is Verdict.PASS
    assert verdict(name, line("generations", 2), line("out_of_memory", 1)).verdict is Verdict.FAIL


def test_lines_of_several_runs_are_judged_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a file that a kill cut short is passed over."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(json.dumps(digest("a", "one")) + '\n{"stage": "P6", "fig')
    two.write_text(json.dumps(digest("b", "two")) + "\n")
    assert main(["--judge", str(one)]) == 0
    assert main(["--judge", str(one), str(two)]) == 1
    assert "differ: P6 steps: " in capsys.readouterr().err
