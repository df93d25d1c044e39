"""A score card that is told to end leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.machine.processes import MARK, marked, wait_until

pytestmark = [pytest.mark.long, pytest.mark.etcd, pytest.mark.gloo]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_score_card_ends_in_order(number: signal.Signals, tmp_path: Path) -> None:
    """No process and no file of its jobs and servers, also where Ctrl-C was ignored as it began."""
    mark = f"score-{tmp_path.name}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", "from elastic3d.cli import main; main()", "chaos", "score", "--kind", "stop"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert wait_until(lambda: any(tmp_path.glob("elastic3d-score-*/quiet-*/nodes/*/agent.log")), 120)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert wait_until(lambda: not marked(mark), 10), marked(mark)
    assert list(tmp_path.glob("elastic3d*")) == []
