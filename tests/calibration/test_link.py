"""Links of which one end fails: the other is not left to wait, and says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from chaos.machine.processes import free_port
from elastic3d.calibration import link
from elastic3d.errors import CalibrationFailed
from tests.paths import ROOT

pytestmark = pytest.mark.gloo

FAILS = """\
import json, sys
if json.loads(sys.argv[2])["rank"] == 1:
    sys.exit("this slot's device is not there")
"""

LEAVES = """\
import os, sys, torch
from elastic3d.calibration import link
link._sample = lambda *given: os._exit(1)
link.meet("127.0.0.1", int(sys.argv[1]), 1, torch.device("cpu"), master=False, seconds=1.0, sizes=(1024, 2048))
"""


def test_a_slot_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is shown, and not that two processes did not meet."""
    monkeypatch.setattr(link, "_ONE", FAILS + link._ONE)
    with pytest.raises(CalibrationFailed, match="this slot's device is not there"):
        link.inside("cpu", seconds=1.0, patience=20.0)


def test_another_node_that_leaves_is_a_failure_with_words() -> None:
    """In the middle of the measurement, by Ctrl-C there."""
    port = free_port()
    other = subprocess.Popen([sys.executable, "-c", LEAVES, str(port)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        with pytest.raises(CalibrationFailed, match=f"the exchange with the other node at 127.0.0.1:{port} failed"):
            link.meet("127.0.0.1", port, 0, torch.device("cpu"), master=True, seconds=1.0, sizes=(1024, 2048))
    finally:
        other.kill()
        other.wait()
