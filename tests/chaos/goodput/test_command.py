"""`elastic3d simulate goodput`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.goodput.ledger import Spent
from chaos.simulation.cli import app

TRACE = "0,0\n60,0\n60,3\n400,3\n400,2\n500,2\n500,3\n700,3\n"


def simulate(tmp_path: Path, *arguments: str, trace: str = TRACE) -> Result:
    path = tmp_path / "spot.csv"
    path.write_text(trace)
    return CliRunner().invoke(app, ["goodput", "--trace", str(path), *arguments])


def test_one_document_and_one_picture(tmp_path: Path) -> None:
    """--json prints what each policy made and where its node-seconds and its money went; --plot draws it."""
    picture = tmp_path / "goodput.svg"
    result = simulate(tmp_path, "--price", "36", "--json", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [one["policy"] for one in document["policies"]] == [
        "elastic3d", "elastic3d-fast", "restart", "data-parallel-only",
    ]  # fmt: skip
    assert document["costs"]["communicators"] == 5.0
    held = 340 * 3 + 100 * 2 + 200 * 3
    for one in (*document["policies"], document["oracle"]):
        assert set(one["node_seconds"]) == {spent.value for spent in Spent}
        assert sum(one["node_seconds"].values()) == pytest.approx(held)
        assert one["money"]["paid"] == pytest.approx(held / 100)
        assert sum(one["money"]["by_category"].values()) == pytest.approx(held / 100)
        assert 0 < one["of_the_oracle"] <= 1
    words = "".join(ElementTree.fromstring(picture.read_text()).itertext())
    assert "3 nodes" in words
    assert "oracle 1.000" in words


def test_the_table_has_a_column_for_each_policy(tmp_path: Path) -> None:
    """Of those asked for, and the oracle's; nothing about money without a price."""
    result = simulate(tmp_path, "--policy", "restart", "--hours", "0.1")
    assert result.exit_code == 0, result.output
    assert "restart" in result.stdout
    assert "elastic3d-fast" not in result.stdout
    assert "recovery" not in result.stdout
    assert "paid" not in result.stdout


def test_costs_are_shown_without_a_trace() -> None:
    """As a file that can be given again."""
    result = CliRunner().invoke(app, ["goodput", "--show-costs", "--cost", "node_start=99"])
    assert result.exit_code == 0
    assert "node_start = 99" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "luck"], "--policy 'luck': choose one of elastic3d, elastic3d-fast, restart"),
        (["--announced", "2"], "--announced 2: it is a share"),
        (["--price", "-1"], "--price -1: give what a node costs"),
        (["--hours", "0"], "--hours 0: give more than 0"),
        (["--hours", "0.01"], "no node is held in its first 36 s"),
        (["--leaf", "7"], "--leaf 7: it does not divide the 512"),
        (["--slots", "0"], "a cluster has at least one node"),
        (["--device", "h300"], "no device is named 'h300'"),
        (["--model", "llama-8"], "no model shape is named 'llama-8'"),
        (["--model", "llama-3-405b"], "no layout fits 3 node"),
        (["--plot", "/dev/null/at.svg"], "/dev/null: it cannot be written"),
        (["--notice", "soon"], "--notice"),
        (["--calibration", "/nowhere"], "cannot be read"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    """With one line that says what to do, exit code other than 0, and nothing on standard output."""
    result = simulate(tmp_path, *arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["--cost", "luck=1"], ["--policy", "luck"], ["--model", "llama-3-405b"]])
def test_what_an_earlier_run_drew_is_not_taken_for_this_ones(arguments: list[str], tmp_path: Path) -> None:
    """Where an error ends it, there is nothing to see."""
    picture = tmp_path / "goodput.svg"
    picture.write_text("<svg/>")
    assert simulate(tmp_path, *arguments, "--plot", str(picture)).exit_code != 0
    assert picture.read_text() == ""


def test_a_trace_is_needed() -> None:
    """And what is no trace is refused, with its line."""
    assert "--trace: give a file" in CliRunner().invoke(app, ["goodput"]).stderr


def test_a_trace_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As one that is unpacked on its way here."""
    rows, given = os.pipe()
    os.write(given, TRACE.encode())
    os.close(given)
    with os.fdopen(rows):
        result = CliRunner().invoke(app, ["goodput", "--trace", f"/dev/fd/{rows}", "--policy", "restart", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["policies"][0]["policy"] == "restart"


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    """With its line."""
    result = simulate(tmp_path, trace="5,one\n")
    assert result.exit_code == 2
    assert "line 1: '5,one' are no two numbers" in result.stderr
