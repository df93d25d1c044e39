"""`elastic3d agent`: what it refuses, what it passes on, and what its exit code says. torchrun and etcd are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from elastic3d.cli.agent import LEFT
from tests.paths import ROOT

COMMAND = [sys.executable, "-c", "from elastic3d.cli import main; main()"]
SCRIPT = ROOT / "chaos" / "scripts" / "train_gpt.py"
SMALL = ("--blocks", "2", "--width", "32", "--context", "16")
PATIENCE = 120.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs torchrun's options"),
        (("train.py",), "--rdzv-backend=static.*give --rdzv-backend=etcd"),
        (("--rdzv-backend=c10d", "--rdzv-endpoint=a:1", "train.py"), "--rdzv-backend=c10d"),
        (("--rdzv-backend=etcd", "--rdzv-id=a", "train.py"), "--rdzv-endpoint is missing"),
        (
            ("--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=a", "--nnodes=x", "t.py"),
            "torchrun cannot",
        ),
        (("--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=a b", "t.py"), "--rdzv-id='a b'"),
        (("--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=a", "--rdzv-conf=mod=x", "t.py"), "mod"),
    ],
)
def test_a_wrong_call_starts_nothing(arguments: tuple[str, ...], words: str) -> None:
    """It says what to give instead, and signals are taken as before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    result = CliRunner().invoke(application(), ["agent", *arguments])
    assert result.exception is not None
    assert getattr(result.exception, "exit_code", None) == 2
    with pytest.raises(type(result.exception), match=words):
        raise result.exception
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


class Node:
    """One agent, and what it printed."""

    def __init__(self, endpoint: str, name: str, output: Path, *script: str) -> None:
        self.output = output
        options = [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--rdzv-backend=etcd",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            f"--rdzv-conf=mode=resident,node={name},timeout=60",
            "--local-addr=127.0.0.1",
        ]
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, "agent", *options, *script],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env={**os.environ, "TMPDIR": str(output.parent), "ELASTIC3D_LOG": "info"},
            )

    def said(self, words: str) -> bool:
        assert self.process.poll() is None, self.output.read_text()[-3000:]
        return words in self.output.read_text()

    def ended(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(self.output.read_text()[-3000:])


@contextmanager
def nodes(*made: Node) -> Iterator[None]:
    """End what is left of some nodes."""
    try:
        yield
    finally:
        for node in made:
            node.process.kill()
            node.process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.gloo
def test_a_node_that_leaves_says_so_and_one_whose_job_is_over_too(tmp_path: Path) -> None:
    """75 for the drained one, 0 for the one that trains to the end."""
    script = (str(SCRIPT), "--steps", "120", "--pause", "0.15", *SMALL)
    with EtcdServer() as etcd:
        stays, goes = (Node(etcd.endpoint, name, tmp_path / name, *script) for name in ("stays", "goes"))
        with nodes(stays, goes):
            until(lambda: all(node.said("generation.sealed") for node in (stays, goes)))
            order = ["drain", "goes", "--endpoint", etcd.endpoint, "--id", "job"]
            assert CliRunner().invoke(application(), order).exit_code == 0
            assert goes.ended() == LEFT
            assert "has left, and the job job goes on" in goes.output.read_text()
            assert stays.ended() == 0


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.gloo
def test_a_signal_is_passed_on_once_and_a_failure_stays_one(tmp_path: Path) -> None:
    """A node that gets SIGTERM leaves in order, with 75; a script that raises ends its node with torchrun's 1.

    The last node's leaving ends the job before its last step: with 75 too, since the job can be started again.
    """
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('broken')\n")
    with EtcdServer() as etcd:
        fails = Node(etcd.endpoint, "fails", tmp_path / "fails", str(broken))
        with nodes(fails):
            assert fails.ended() == 1
        script = (str(SCRIPT), "--steps", "200", "--pause", "0.3", *SMALL)
        stays, goes = (Node(etcd.endpoint, name, tmp_path / name, *script) for name in ("stays", "goes"))
        with nodes(stays, goes):
            until(lambda: all(node.said("generation.sealed") for node in (stays, goes)))
            goes.process.send_signal(signal.SIGTERM)
            assert goes.ended() == LEFT
            text = goes.output.read_text()
            assert "node.draining" in text
            assert "a second SIGTERM" not in text
            stays.process.send_signal(signal.SIGTERM)
            assert stays.ended() == LEFT
            assert "stopped before its last step" in stays.output.read_text()
