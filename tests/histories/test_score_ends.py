"""A score card that is told to end leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.machine.processes import MARK, marked, wait_until

pytestmark = [pytest.mark.long, pytest.mark.etcd, pytest.mark.gloo]


@pytest.mark.parametrize(
    ("number", "kinds", "job", "over"),
    [(signal.SIGINT, ["stop"], "quiet-*", []), (signal.SIGTERM, ["stop", "slow"], "1", ["stop"])],
    ids=["Ctrl-C in the undisturbed job", "SIGTERM in a long trial"],
)
def test_a_score_card_ends_in_order(
    number: signal.Signals, kinds: list[str], job: str, over: list[str], tmp_path: Path
) -> None:
    """No process and no file of its jobs and servers, also where Ctrl-C was ignored as it began, and at once.

    The card has the trials that were over.
    """
    mark, printed = f"score-{tmp_path.name}-{os.getpid()}", tmp_path / "card.json"
    options = [word for kind in kinds for word in ("--kind", kind)]
    with (
        printed.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-c", "from elastic3d.cli import main; main()", "chaos", "score", "--json", *options],
            stdout=out,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(tmp_path), MARK: mark},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        ) as process,
    ):
        assert wait_until(lambda: any(tmp_path.glob(f"elastic3d-score-*/{job}/nodes/*/agent.log")), 240)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert wait_until(lambda: not marked(mark), 10), marked(mark)
    assert list(tmp_path.glob("elastic3d*")) == []
    if over:
        card = json.loads(printed.read_text())
        assert (card["interrupted"], card["wanted"]) == (True, len(kinds))
        assert [row["kind"] for row in card["rows"]] == over
    else:
        assert printed.read_text() == ""
