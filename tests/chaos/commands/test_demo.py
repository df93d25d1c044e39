"""The command line: what it refuses, how it says so, and what it prints to standard output."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from chaos.commands import demo as demo_command
from chaos.machine.processes import children, wait_until
from chaos.playing.outcome import Outcome
from chaos.servers.etcd import EtcdServer
from elastic3d.errors import UsageError
from tests.chaos.judging.test_oracle import naming

DEMO = [sys.executable, "-c", "from elastic3d.cli import main; main()", "demo"]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kill", "20"], "NODE@STEP"),
        (["--join", "40"], "@STEP"),
        (["--kill", "9@20"], "no such node"),
        (["--drain", "20"], "--drain '20': expected NODE@STEP"),
        (["--stop", "9@20"], "no such node"),
        (["--drain", "1@20", "--kill", "1@30"], "only once"),
        (["--layout", "pp=two"], "layout 'pp=two': pp must be a whole number"),
        (["--etcd", "localhost"], "HOST:PORT"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    """With exit code 2, one line on standard error, no traceback, and nothing on standard output."""
    result = demo(*arguments, "--json")
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_unreachable_etcd_is_named() -> None:
    """The message has the endpoint and what to do; the exit code is not 0."""
    with socket.socket() as taken:
        # Bound but not listening: nobody else gets the port, and nobody answers.
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        result = demo("--etcd", endpoint, "--json")
    assert result.returncode == 1
    assert endpoint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.etcd
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C or SIGTERM in the middle ends every agent and the etcd, and removes the temporary folder."""
    given = ["--out", str(tmp_path), "--json"]
    with subprocess.Popen([*DEMO, *given], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        # Its etcd and four agents.
        assert wait_until(lambda: len(children(process.pid)) >= 5, 60)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert process.stdout is not None
        assert process.stdout.read() == b""


@pytest.mark.etcd
def test_an_alarm_about_a_node_to_which_nothing_was_done_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All that is done to the job is known; to an etcd that others run, they may do more."""
    app, named = typer.Typer(), naming("node2")
    app.command()(demo_command.demo)
    monkeypatch.setattr(demo_command, "play_watched", lambda *_, **__: named)
    given = ["--kill", "1@3", "--steps", "6", "--no-compare", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, "rank.stuck named node2" in result.stdout) == (1, True), result.output
    with EtcdServer() as theirs:
        result = CliRunner().invoke(app, [*given, "--etcd", theirs.endpoint])
    assert result.exit_code == 0, result.output


@pytest.mark.etcd
def test_what_an_earlier_demo_drew_is_not_taken_for_this_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where an error ends it, there is nothing to see."""

    def play(*_: object, **__: object) -> Outcome:
        raise UsageError("it cannot be played")

    app = typer.Typer()
    app.command()(demo_command.demo)
    monkeypatch.setattr(demo_command, "play_watched", play)
    (tmp_path / "loss.svg").write_text("<svg/>")
    assert CliRunner().invoke(app, ["--out", str(tmp_path)]).exit_code == 2
    assert (tmp_path / "loss.svg").read_text() == ""


def test_help_shows_examples() -> None:
    """The examples in the help of the command and of the demo work literally."""
    result = subprocess.run([*DEMO[:-1], "--help"], capture_output=True, text=True, timeout=120, check=True)
    assert "elastic3d demo --kill 1@20 --join @40" in result.stdout
    assert "--kill" in demo("--help").stdout
