"""Which versions of torch `make matrix` tests, and what it says of each."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from elastic3d.torch_support import BEYOND, OLDEST
from tools.matrix import Build, Result, builds, offered, read, result_of, table

LISTING = """WARNING: pip index is currently an experimental command.
torch (2.16.0)
Available versions: 2.16.0, 2.13.0+cpu, 2.13.0, 2.12.1+cpu, 2.12.0+cpu, 2.11.0, 2.10.2, 2.10.10, 2.9.1
  INSTALLED: 2.13.0+cpu
"""

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x"/></testcase>
<testcase classname="tests.b" name="three"><skipped/></testcase>
<testcase classname="tests.b" name="four"><error message="x"/></testcase>
</testsuite></testsuites>"""


def test_each_supported_version_has_a_build_or_a_reason() -> None:
    """The newest patch for CPUs; on Linux a plain version is one for CUDA."""
    of = {build.minor: build for build in builds(offered(LISTING), linux=True)}
    assert list(of) == [f"2.{number}" for number in range(OLDEST[1], BEYOND[1])]
    assert (of["2.13"].version, of["2.12"].version) == ("2.13.0+cpu", "2.12.1+cpu")
    assert of["2.11"] == Build(minor="2.11", skipped="2.11.0 is a build for CUDA, of gigabytes; none is for CPUs")
    assert of["2.10"].skipped.startswith("2.10.10 is a build")
    assert of["2.14"] == Build(minor="2.14", skipped="no index offers it")
    elsewhere = {build.minor: build.version for build in builds(offered(LISTING), linux=False)}
    assert (elsewhere["2.13"], elsewhere["2.10"]) == ("2.13.0+cpu", "2.10.10")
    assert [build.version for build in builds(offered(LISTING), linux=True, any_build=True)][1] == "2.11.0"
    assert offered("ERROR: No matching distribution found for torch") == []


def test_a_report_becomes_a_line() -> None:
    """Failures by name; a version under which no test ran is not passed."""
    result = read(Build(minor="2.13", version="2.13.0+cpu"), REPORT, 90.0)
    assert (result.verdict, result.passed, result.skipped) == ("failed", 1, 1)
    assert result.failed == ("tests.a::two", "tests.b::four")
    assert read(Build(minor="2.13", version="2.13.0"), "<testsuites/>", 1.0).verdict == "broken"
    written = io.StringIO()
    Console(width=200, file=written).print(table([result, Result(minor="2.11", version="", detail="none")]))
    shown = written.getvalue()
    assert "tests.a::two, tests.b::four" in shown
    assert "left out" in shown


def test_what_cannot_be_installed_is_said(tmp_path: Path) -> None:
    """A version without a build is not tried; one that fails does not end the others."""
    say = Console(quiet=True)
    assert result_of(Build(minor="2.11", skipped="why"), tmp_path, [], say).verdict == "left out"
    (tmp_path / "file").touch()
    broken = result_of(Build(minor="2.13", version="2.13.0"), tmp_path / "file", [], say)
    assert (broken.verdict, "file" in broken.detail) == ("broken", True)
