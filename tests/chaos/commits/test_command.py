"""`elastic3d simulate commits`: what it prints and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from chaos.commits.schedule import draw
from chaos.simulation.cli import app
from tests.chaos.commits.test_planted_bugs import first_failure, keep_the_fence_outside_the_store


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["commits", *arguments])


def test_the_json_document_has_every_count() -> None:
    """--json prints one document with exactly the documented fields; nothing was violated."""
    result = simulate("--schedules", "5", "--seed", "9", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert set(document) == {"schedules", "seconds", "operations", "commits", "refusals", "failures"}
    assert document["schedules"] == 5
    assert document["failures"] == []
    assert document["commits"] > 0


def test_a_failure_is_printed_with_its_seed_and_schedule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit code is 1, and the printed schedule can be played again."""
    keep_the_fence_outside_the_store(monkeypatch)
    outcome = first_failure()
    assert outcome is not None
    result = simulate("--schedules", "1", "--seed", str(outcome.schedule.job.seed), "--json")
    assert result.exit_code == 1
    failure = json.loads(result.stdout)["failures"][0]
    text = tmp_path / "failure.txt"
    text.write_text(failure["schedule"])
    again = simulate("--replay", str(text))
    assert again.exit_code == 1
    assert f"# seed {failure['seed']}" in again.stdout
    assert "VIOLATED" in again.stdout
    monkeypatch.undo()
    assert simulate("--replay", str(text)).exit_code == 0


def test_a_printed_schedule_can_be_replayed() -> None:
    """The summary says how many schedules were played, and how many a minute."""
    result = simulate("--schedules", "3")
    assert "3 schedules" in result.stdout
    assert "a minute" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "0"], "--schedules 0"),
        (["--replay", "/nowhere/at/all.txt"], "cannot be read"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    """With one line and exit code 2."""
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path) -> None:
    """The wrong line is named."""
    text = tmp_path / "wrong.txt"
    text.write_text(f"{draw(1)}\nleader1 sometimes\n")
    result = simulate("--replay", str(text))
    assert result.exit_code == 2
    assert "leader1 sometimes" in result.stderr
