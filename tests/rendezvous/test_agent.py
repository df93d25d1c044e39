"""What an agent knows of its own start."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

ASK = """
import logging, sys, time
sys.argv[0] = {program!r}
time.sleep(0.5)
from elastic3d.rendezvous import agent
for _ in range(2):
    print(time.monotonic() - agent.begun())
"""


@pytest.mark.parametrize(
    ("program", "old"), [("/usr/bin/torchrun", True), ("/lib/torch/distributed/run.py", True), ("/job/run.py", False)]
)
def test_torchrun_was_started_for_its_one_job(program: str, old: bool) -> None:
    """Its imports are part of that, and a shell that has become it is not; a second job of a process begins later."""
    began = time.monotonic()
    line = f'sleep 1; exec {sys.executable} -c "$0"'
    asked = ["sh", "-c", line, ASK.format(program=program)]
    first, second = map(float, subprocess.run(asked, capture_output=True, check=True, text=True).stdout.split())
    took = time.monotonic() - began
    assert (0.5 <= first <= took - 0.9) if old else first < 0.1
    assert second < 0.1
