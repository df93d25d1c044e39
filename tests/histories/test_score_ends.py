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


@pytest.mark.parametrize(
    ("number", "kind", "job"),
    [(signal.SIGINT, "stop", "quiet-*"), (signal.SIGTERM, "slow", "[0-9]*")],
    ids=["Ctrl-C in the undisturbed job", "SIGTERM in a long trial"],
)
def test_a_score_card_ends_in_order(number: signal.Signals, kind: str, job: str, tmp_path: Path) -> None:
    """No process and no file of its jobs and servers, also where Ctrl-C was ignored as it began, and at once."""
    mark = f"score-{tmp_path.name}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", "from elastic3d.cli import main; main()", "chaos", "score", "--kind", kind],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        assert wait_until(lambda: any(tmp_path.glob(f"elastic3d-score-*/{job}/nodes/*/agent.log")), 120)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert wait_until(lambda: not marked(mark), 10), marked(mark)
    assert list(tmp_path.glob("elastic3d*")) == []
