"""The script that `elastic3d init` writes trains: by hand, and as a job of the commands that it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdServer
from tests.paths import ROOT

PATIENCE = 200.0


def run(words: list[str], folder: Path) -> str:
    """Run a command with the programs of this environment to its end, and return its output."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.gloo
def test_what_is_written_trains_as_it_says(tmp_path: Path) -> None:
    """Alone, and as the job whose commands are printed: it ends with 0, and its checkpoints are in the folder."""
    with EtcdServer() as etcd:
        command = f"elastic3d init first --on local --endpoint {etcd.endpoint} --json"
        (tmp_path / "first").mkdir()
        document = json.loads(run(command.split(), tmp_path))
        folder = tmp_path / "first"
        alone, node, status = (shlex.split(line, comments=True) for line in document["next"] if line[:2] != "cd")
        run([*alone[:-1], "3"], folder)
        assert not (folder / "checkpoints").exists()
        assert "step 10: loss" in run([*node, "12"], folder)
        assert any((folder / "checkpoints").iterdir())
        assert "ended" in run([*status, "--json"], folder)
