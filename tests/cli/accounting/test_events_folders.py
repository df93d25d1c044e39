"""`elastic3d goodput`, `timeline` and `report` on folders of event files: tests/testdata/accounting.

The events there are those of a job of three nodes, of which one was killed at step 8 while a fourth was about to come.
`pytest tests/cli/accounting --rewrite-displays` writes the present output; a person reviews the diff.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from elastic3d.cli import application
from elastic3d.errors import UsageError
from elastic3d.health.evidence import VERDICT
from elastic3d.membership.stalls import Verdict, VerdictKind
from elastic3d.values import to_json
from tests.accounting.written import Written, assert_nested
from tests.pages.parsed import assert_loads_nothing, parsed
from tests.paths import DATA, ROOT

SHOWN = DATA / "accounting"
JOB = SHOWN / "events"


def called(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(application(), [str(word) for word in words])


def document(folder: Path) -> dict[str, Any]:
    result = called("goodput", folder, "--json")
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.stdout)
    return read


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the job's events that a test may damage."""
    return Path(shutil.copytree(JOB, tmp_path / "events"))


def test_the_account_of_a_real_job_as_a_person_reads_it(request: pytest.FixtureRequest) -> None:
    """What the death and the join cost, and where it went."""
    shown = called("goodput", JOB).stdout
    page = SHOWN / "goodput.txt"
    if request.config.getoption("--rewrite-displays"):
        page.write_text(shown)
    assert shown == page.read_text()


def test_the_account_of_a_real_job_adds_up() -> None:
    """Node by node, from its first line to its last, as the files themselves have them."""
    account = document(JOB)
    assert account["schema"] == 1
    for node in account["nodes"]:
        times = [json.loads(line)["at"] for line in (JOB / f"{node['node']}-0.jsonl").read_text().splitlines()]
        assert node["microseconds"] == round(max(times) * 1e6) - round(min(times) * 1e6)
        assert sum(node["by_category"].values()) == node["microseconds"]
    assert sum(account["by_category"].values()) == sum(node["microseconds"] for node in account["nodes"])
    assert [(one["cause"], one["gone"], one["come"]) for one in account["generations"]] == [
        ("start", [], []),
        ("death", ["node1"], []),
        ("join", [], ["node3"]),
    ]
    assert account["steps"] == 24
    assert account["by_category"]["unknown"] == 0
    assert account["remarks"] == []


def test_the_timeline_of_a_real_job_nests_and_has_its_parts(tmp_path: Path) -> None:
    """As Perfetto asks for; another file of that name is replaced."""
    output = tmp_path / "trace.json"
    output.write_text("old")
    result = called("timeline", JOB, "-o", output)
    assert result.exit_code == 0, result.output
    made = json.loads(output.read_text())["traceEvents"]
    assert_nested(made)
    names = {one["name"] for one in made}
    assert {"generation 1", "generation 2", "generation 3", "death", "join", "noticing", "restoring"} <= names
    assert {f"step {number}" for number in range(1, 25)} <= names
    assert {"peer.lost", "snapshot.held", "checkpoint.committed", "node.examined"} <= names
    processes = [one["args"]["name"] for one in made if one["name"] == "process_name"]
    assert sorted(processes) == ["job", "node0", "node1", "node2", "node3"]
    assert os.listdir(tmp_path) == ["trace.json"]
    assert called("timeline", JOB, "-o", "-").stdout == output.read_text()


def test_torn_lines_and_other_files_cost_what_they_held_and_are_said(copied: Path) -> None:
    """Half a line as after a crash, a line that is none, and what another program left there."""
    before = document(copied)
    with (copied / "node1-0.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n\n[1, 2]\n{"event": "step.committed", "at": 1e999}\n{"event": "step.comm')
    (copied / "other.txt").write_text("not ours")
    (copied / "evidence").mkdir()
    after = document(copied)
    assert after["remarks"] == ["4 lines of node1-0.jsonl cannot be read, as after a crash, and count as not written"]
    assert {**after, "remarks": []} == before


def test_the_older_file_of_a_node_is_read_before_the_newer_one(copied: Path) -> None:
    """Past half of its limit a log goes on in another file."""
    before = document(copied)
    for node in ("node0", "node2"):
        path = copied / f"{node}-0.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        (copied / f"{node}-0.jsonl.1").write_text("".join(lines[:20]))
        path.write_text("".join(lines[20:]))
    assert document(copied) == before


def test_a_node_whose_file_is_missing_is_named(copied: Path) -> None:
    """node1 wrote down the steps of the first generation: they are known by what others held of them."""
    (copied / "node1-0.jsonl").unlink()
    account = document(copied)
    assert "generation 1 had node1, whose events are not there" in account["remarks"]
    assert account["generations"][0]["inferred"]
    assert account["steps"] == 24


@pytest.mark.parametrize("command", ["goodput", "timeline", "report"])
def test_folders_without_events_are_refused_in_words_that_help(command: str, tmp_path: Path) -> None:
    """They say what to give instead; nothing is written."""
    output = ("-o", tmp_path / "out") if command != "goodput" else ()
    for folder, words in (
        (tmp_path / "nowhere", "is no folder: give the one that the script names"),
        (tmp_path, "holds no event files"),
    ):
        error = called(command, folder, *output).exception
        assert isinstance(error, UsageError)
        assert words in str(error)
    (tmp_path / "a-0.jsonl").write_text("\n\nhello\n")
    assert "hold no events" in str(called(command, tmp_path, *output).exception)
    assert os.listdir(tmp_path) == ["a-0.jsonl"]


def test_of_several_runs_the_newest_is_taken_unless_one_is_named(tmp_path: Path) -> None:
    """Others are named; one that is not there is refused by those that are."""
    for run, at in (("first", 0.0), ("second", 50.0)):
        written = Written(run)
        written.say("a", at, "node.started")
        written.say("a", at + 1, "member.joined", incarnation="1")
        written.files(tmp_path)
    account = document(tmp_path)
    assert (account["run"], account["other_runs"], account["microseconds"]) == ("second", ["first"], 1_000_000)
    assert '"run": "first"' in called("goodput", tmp_path, "--id", "first", "--json").stdout
    assert "no run 'third'" in str(called("goodput", tmp_path, "--id", "third").exception)


def test_a_disk_that_is_full_leaves_no_timeline_and_the_old_one(tmp_path: Path) -> None:
    """Half a file would be taken for a whole one."""
    output = tmp_path / "trace.json"
    output.write_text("old")
    limited = subprocess.run(
        [sys.executable, "-c", "from elastic3d.cli import main; main()", "timeline", JOB, "-o", output],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert limited.returncode == 1
    assert limited.stderr.startswith("elastic3d: ")
    assert "Traceback" not in limited.stderr
    assert output.read_text() == "old"
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    """Only files are replaced, and there has to be a folder for them."""
    written = Written()
    written.say("a", 0, "node.started")
    folder = written.files(tmp_path / "events")
    pipe = tmp_path / "trace.json"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        result = called("timeline", folder, "-o", pipe)
        assert result.exit_code == 0, result.output
        assert json.loads(os.read(reader, 1 << 16))["otherData"]["run"] == "made-up"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert "there is no folder" in str(called("timeline", JOB, "-o", tmp_path / "no" / "trace.json").exception)


def test_names_from_files_do_not_steer_a_terminal(tmp_path: Path) -> None:
    """What others wrote is shown without its control characters."""
    written = Written("run\x1b[2J")
    written.say("a\x1b[31m", 0, "node.started")
    written.say("a\x1b[31m", 1, "member.joined", incarnation="1")
    written.files(tmp_path)
    assert "\x1b" not in called("goodput", tmp_path).stdout


def test_the_document_is_the_account(tmp_path: Path) -> None:
    """Field by field, and the same for a second reading."""
    written = Written()
    written.say("a", 0, "node.started")
    written.say("a", 1, "member.joined", incarnation="1")
    _, _, account = written.read()
    read = document(written.files(tmp_path))
    assert read == {"schema": 1, **json.loads(json.dumps(to_json(account)))}


def test_the_report_of_a_real_job_is_one_page_and_one_document(tmp_path: Path) -> None:
    """Of the same run: what `goodput` accounts for is in it; another file of that name is replaced."""
    output = tmp_path / "report.html"
    output.write_text("old")
    result = called("report", JOB, "-o", output)
    assert result.exit_code == 0, result.output
    assert "24 steps in 14 s on 4 nodes, in 3 generations; it came to its end" in result.stdout
    text = output.read_text()
    assert_loads_nothing(text)
    read = parsed(text)
    for part in ("accounted-3358f65c", "death", "node1: 127.0.0.1", "noticing 0.18 s", "the beginning"):
        assert part in read.text
    assert os.listdir(tmp_path) == ["report.html"]
    printed = called("report", JOB, "--json")
    told = json.loads(printed.stdout)
    assert (told["schema"], told["ending"], len(told["curve"])) == (1, "done", 24)
    assert {"schema": 1, **told["account"]} == document(JOB)
    assert [one["cause"] for one in told["recoveries"]] == ["start", "death", "join"]
    assert [one["step"] for one in told["checkpoints"]] == [5, 10, 15, 20, 24]
    assert called("report", JOB, "-o", "-").stdout.startswith("<!doctype html>")


def test_a_report_says_what_it_could_not_read(copied: Path, tmp_path: Path) -> None:
    """Half a line, one without an end, and a bundle of evidence of which a crash left part."""
    with (copied / "node0-0.jsonl").open("ab") as file:
        file.write(b'{"event": "step.comm\n' + b"x" * (3 << 20) + b"\n\xff\n" + b"[" * 5000)
    bundle = copied / "evidence" / "2.0-9-stuck-node0"
    bundle.mkdir(parents=True)
    (bundle / VERDICT).write_text("{")
    told = json.loads(called("report", copied, "--json").stdout)
    remarks = " ".join(told["account"]["remarks"])
    assert "4 lines of node0-0.jsonl cannot be read" in remarks
    assert f"{bundle / VERDICT} holds no verdict" in remarks
    assert told["account"]["steps"] == 24
    output = tmp_path / "report.html"
    assert called("report", copied, "-o", output).exit_code == 0
    assert "4 lines of node0-0.jsonl cannot be read" in parsed(output.read_text()).text


def test_a_report_has_the_page_that_explain_prints(copied: Path) -> None:
    """Of a bundle of evidence, word for word."""
    verdict = Verdict(kind=VerdictKind.STUCK, fault="stopped", key="2.0", step=9, detail="rank 0 of node2 is stopped")
    bundle = copied / "evidence" / "2.0-9-stuck-node0"
    bundle.mkdir(parents=True)
    (bundle / VERDICT).write_text(json.dumps({"schema": 1, **to_json(verdict)}))
    (finding,) = json.loads(called("report", copied, "--json").stdout)["findings"]
    assert finding["text"] == called("explain", "--events", copied).stdout.rstrip("\n")
    assert str(bundle) in finding["text"]


def test_a_report_is_not_written_where_it_cannot_be(tmp_path: Path) -> None:
    """A folder, or one that is not there; an output that fills up leaves the old page."""
    assert "is a folder; give a file" in str(called("report", JOB, "-o", tmp_path).exception)
    assert "there is no folder" in str(called("report", JOB, "-o", tmp_path / "no" / "report.html").exception)
    assert os.listdir(tmp_path) == []
    result = called("report", JOB, "-o", "/dev/full")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
