"""torchtitan's own training with checkpoints of ours, where torchtitan is installed.

    pip install --target DIR --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing triton torchdata \\
        einops tyro docstring_parser typeguard
    PYTHONPATH=DIR:. pytest -m slow tests/integrations/test_torchtitan.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from chaos.machine.processes import free_port
from checkpointing import open_store, verify
from elastic3d.integrations.newest import newest_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: see this module"),
]

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_debug.py"


def alone(store: Path, steps: int, mode: str) -> tuple[int, str]:
    """Train in one process; return the first step that it made, and what the weights are."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = subprocess.run(
        [sys.executable, SCRIPT, store, str(steps), mode, store.with_suffix(".titan")],
        env=os.environ | place | meeting,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert said.returncode == 0, said.stdout[-4000:]
    (begun,) = re.findall(r"Training starts at step (\d+)", said.stdout)
    (digest,) = re.findall(r"worker: end step=\d+ digest=(\w+)", said.stdout)
    return int(begun), digest


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_that_is_started_again_ends_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    """From the step at which it ended, with the optimizer, the schedule and the place in the data."""
    begun, whole = alone(tmp_path / "whole", 4, "disabled")
    assert begun == 1
    assert alone(tmp_path / "parts", 2, mode)[0] == 1
    assert alone(tmp_path / "parts", 4, mode) == (3, whole)
    assert newest_step(str(tmp_path / "parts")) == 4
    assert [finding for finding in verify(open_store(str(tmp_path / "parts"))) if finding.checkpoints] == []
