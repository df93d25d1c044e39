"""`elastic3d calibrate`: a real, small calibration of this machine, and what the command refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.machine.processes import free_port
from elastic3d.calibration.record import load
from elastic3d.cli import application
from elastic3d.cli.calibrate import busy
from elastic3d.errors import ConfigurationError, UsageError
from tests.paths import ROOT

pytestmark = [pytest.mark.gloo, pytest.mark.long]
SCRIPT = str(ROOT / "chaos" / "scripts" / "train_gpt.py")
COMMAND = [sys.executable, "-c", "from elastic3d.cli import main; main()", "calibrate"]
run = CliRunner()


def start(*arguments: str, said: Path) -> subprocess.Popen[bytes]:
    """Start `elastic3d calibrate` as a shell does in the foreground: it receives Ctrl-C."""
    with said.open("wb") as out:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


def test_calibration_measures_the_machine_and_a_block(tmp_path: Path) -> None:
    """All figures are present and plausible, and a plan can use them."""
    path = tmp_path / "profile.json"
    small = ["--for", "1s", "--device", "cpu", "--slots", "2", "-o", str(path)]
    result = run.invoke(application(), ["calibrate", SCRIPT, *small, "--", "--width", "32", "--blocks", "2"])
    assert result.exit_code == 0, result.output
    speeds = load(path, device="cpu")
    assert 1e8 < speeds.flops < 1e14
    assert 1e8 < speeds.memory_bandwidth < 1e13
    assert speeds.inside is not None
    assert speeds.inside.backend == "gloo"
    assert 0 <= speeds.inside.latency < 0.1
    assert 1e6 < speeds.inside.bandwidth < 1e12
    assert speeds.between is None
    assert speeds.block is not None
    assert speeds.block.forward > 0
    assert speeds.block.backward > 0
    assert speeds.block.flops > 0
    assert speeds.block.kept_bytes > 0
    for words in ("products", "inside a node", "a block", "saved to"):
        assert words in result.stdout
    shown = run.invoke(application(), ["calibrate", "--show", "-o", str(path), "--json"])
    assert json.loads(shown.stdout)["schema"] == 1
    planned = run.invoke(
        application(),
        ["plan", "--model", "gpt-125m", "--global-batch", "8", "--slots", "2", "--calibration", str(path)],
    )
    assert planned.exit_code == 0, planned.output
    assert "measured on" in planned.stdout


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, process or folder is left; the exit code is 130, as a shell expects."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = start("--for", "60s", "-o", str(tmp_path / "profile.json"), said=tmp_path / "said")
    try:
        deadline = time.monotonic() + 90
        while not _children(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        children = _children(process.pid)
        assert children, (tmp_path / "said").read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130, (tmp_path / "said").read_text()
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert not (tmp_path / "profile.json").exists()
    assert not list((tmp_path / "temporary").iterdir())


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_nodes_measure_the_link_between_them(tmp_path: Path) -> None:
    """One listens, the other is given its address; both save the same link."""
    port = free_port()
    small = ["--for", "500ms", "--device", "cpu"]
    one = start(*small, "--listen", str(port), "-o", str(tmp_path / "one.json"), said=tmp_path / "said-1")
    other = start(*small, "--peer", f"127.0.0.1:{port}", "-o", str(tmp_path / "other.json"), said=tmp_path / "said-2")
    try:
        codes = [one.wait(120), other.wait(120)]
    finally:
        for process in (one, other):
            process.kill()
            process.wait()
    assert codes == [0, 0], (tmp_path / "said-1").read_text() + (tmp_path / "said-2").read_text()
    between = load(tmp_path / "one.json").between
    assert between is not None
    assert between == load(tmp_path / "other.json").between


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "tpu"), "--device 'tpu'.*cuda"),
        (("--precision", "fp8"), "fp8 cannot be measured"),
        (("--precision", "int4"), "--precision 'int4'"),
        (("--for", "60x"), "--for='60x': give seconds, or a number with ms, s, m or h"),
        (("-o", "/nowhere/at/all.json"), "--output '/nowhere/at/all.json': its folder is not there"),
        (("--peer", "node-1"), "--peer 'node-1'.*HOST:PORT"),
        (("--peer", "node-1:70000"), "HOST:PORT"),
        (("--peer", "node-1:29400", "--listen", "29400"), "one node listens"),
        (("--show", "-o", "/nowhere.json"), "cannot be read"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(arguments: tuple[str, ...], words: str) -> None:
    """The exit code is 2 and the message says what would be right."""
    result = run.invoke(application(), ["calibrate", *arguments])
    assert isinstance(result.exception, UsageError | ConfigurationError), result.output
    assert result.exception.exit_code == 2
    with pytest.raises(type(result.exception), match=rf"(?s){words}"):
        raise result.exception


def test_a_port_that_cannot_be_is_a_wrong_call() -> None:
    """As for the doctor."""
    assert run.invoke(application(), ["calibrate", "--listen", "70000"]).exit_code == 2


def test_a_busy_machine_is_reported() -> None:
    """A fraction of one core is what a desktop uses; half of all cores is another job."""
    assert busy(0.5, 2) == ""
    assert "load 1.0 on 2 cores" in busy(1.0, 2)
