"""`elastic3d simulate membership`: what it prints and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.simulation.bugs import FOUND
from chaos.simulation.trace import Held, Trace, read_trace, scaled

COMMAND = [sys.executable, "-c", "from chaos.simulation.cli import app; app()", "membership"]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)


def test_the_json_document_has_every_formation() -> None:
    """--json prints one document with exactly the documented fields and nothing else; nothing was violated."""
    result = simulate("--nodes", "60", "--seed", "3", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document) == {"formations", "largest_record_bytes", "violations"}
    assert document["violations"] == []
    assert 0 < document["largest_record_bytes"] < 1024 * 1024
    first, *later = document["formations"]
    assert set(first) == {"generation", "cause", "nodes", "seconds", "etcd_operations", "etcd_bytes"}
    assert (first["generation"], first["cause"], first["nodes"]) == (1, "start", 60)
    assert {"death", "join", "drain"} <= {formation["cause"] for formation in later}


def test_a_trace_is_followed(tmp_path: Path) -> None:
    """Nodes come and go as its rows say; the hours between them cost nothing."""
    trace = tmp_path / "spot.csv"
    trace.write_text("0,0\n100,0\n100,6\n7200,6\n7200,4\n80000,4\n80000,9\n")
    result = simulate("--trace", str(trace), "--json")
    assert result.returncode == 0, result.stderr
    formations = json.loads(result.stdout)["formations"]
    assert formations[0]["nodes"] == 6
    assert 4 in [formation["nodes"] for formation in formations]
    assert formations[-1]["nodes"] == 9


@pytest.mark.long
def test_schedules_are_counted() -> None:
    """--schedules reports how many were played a minute, and that none failed."""
    result = simulate("--schedules", "20", "--seed", "5")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "20 schedules" in result.stdout
    assert "a minute" in result.stdout
    document = json.loads(simulate("--schedules", "20", "--seed", "5", "--json").stdout)
    assert (document["schedules"], document["failures"]) == (20, [])
    assert document["generations"] > 20


def test_a_schedule_in_a_file_is_replayed(tmp_path: Path) -> None:
    """One of the bugs found, as the page of the reference prints it, passes; what is no schedule is refused."""
    file = tmp_path / "found.txt"
    file.write_text(FOUND[0].text)
    result = simulate("--replay", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "etcd-away for 2.2" in result.stdout
    file.write_text("job members=3 seed=1\n3.0 explode n1\n")
    refused = simulate("--replay", str(file))
    assert (refused.returncode, "explode" in refused.stderr) == (2, True)
    assert simulate("--replay", str(file), "--nodes", "3").returncode == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no rows"),
        ("5,1\n-3,2\n", "line 2: its time is -3"),
        ("5,1\n4,2\n", "line 2: its time, 4, is before"),
        ("5,1\nnan,2\n", "line 2: its time is nan"),
        ("5,one\n", "line 1: '5,one' are no two numbers"),
        ("5\n", "line 1: it has 1 field"),
        ("5,-1\n", "line 1: it holds -1 nodes"),
        ("5,0\n", "never holds a node"),
        ("".join(f"{at / 10},{1 + at % 2}\n" for at in range(12)), "12 times within 1.1 s; if its times are hours"),
        ("0,1\n41000000,2\n", "475 days; if its times are milliseconds give --unit ms"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """With one line that names the file and the place, exit code 2, and nothing on standard output."""
    trace = tmp_path / "bad.csv"
    trace.write_text(text)
    result = simulate("--trace", str(trace))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert str(trace) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--trace", "/nowhere/at/all.csv"], "cannot be read"),
        (["--minutes", "5"], "--trace"),
        (["--unit", "h"], "--unit h: it needs a --trace"),
        (["--trace", "/nowhere/at/all.csv", "--unit", "days"], "--unit days: give one of ms, s, m, h"),
        (["--schedules", "0"], "--schedules 0"),
        (["--schedules", "5", "--nodes", "5"], "--seed and --json alone"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str) -> None:
    """With one line and exit code 2."""
    result = simulate(*arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_trace_is_scaled_to_a_peak(tmp_path: Path) -> None:
    """The largest count becomes the peak and the others keep their proportion; a pair of rows is one change."""
    trace = tmp_path / "spot.csv"
    trace.write_text("0,0\n10,0\n10,4\n20,4\n20,2\n")
    changes = read_trace(trace).changes
    assert changes == (Held(at=0, nodes=0), Held(at=10, nodes=4), Held(at=20, nodes=2))
    assert [change.nodes for change in scaled(changes, 1000)] == [0, 1000, 500]


def test_times_may_count_another_unit(tmp_path: Path) -> None:
    """Which a person says: what looks like seconds may be milliseconds, and what does not may be seconds."""
    trace = tmp_path / "spot.csv"
    trace.write_text("0,1\n0.5,2\n1.25,2\n")
    assert read_trace(trace, "h") == Trace(changes=(Held(at=0, nodes=1), Held(at=1800, nodes=2)), end=4500)
    assert read_trace(trace) == read_trace(trace, "s")
    trace.write_text("".join(f"{at / 10},{1 + at % 2}\n" for at in range(12)))
    assert read_trace(trace, "s").end == pytest.approx(1.1)


def test_a_trace_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """As spreadsheets write it; its end is known from the same reading, since a pipe has no second one."""
    trace = tmp_path / "spot.csv"
    trace.write_bytes(b"\xef\xbb\xbf0,4\r\n20,4\r\n")
    assert read_trace(trace) == Trace(changes=(Held(at=0, nodes=4),), end=20)


@pytest.mark.slow
def test_a_thousand_nodes_form_a_generation() -> None:
    """Within five virtual seconds of the last one's arrival, with a record small enough for etcd."""
    result = simulate("--nodes", "1000", "--seed", "3", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["formations"][0]["nodes"] == 1000
    assert document["formations"][0]["seconds"] < 5.0
    assert document["largest_record_bytes"] < 1024 * 1024
    # Everybody receives only the changes: the whole record alone would be more than twice as much.
    for formation in document["formations"][1:]:
        assert formation["etcd_bytes"] < document["largest_record_bytes"] * formation["nodes"] / 2, formation
