"""The ends of trainers, nodes and agents when two of them coincide."""

from __future__ import annotations

import json
import os
import queue
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from elastic3d.errors import MembershipError, TrainingFailed
from elastic3d.membership import actions as acts
from elastic3d.rendezvous import guard
from elastic3d.values import ModelProfile
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.departure import LeaveRequest
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.warming import TRIES, Inbox, Measured, Signalled, measure, wait_at_gate
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from tests.paths import ROOT
from tests.worker.keepers import assignment, eventually, gone

PROFILE = ModelProfile(blocks=2, parameters=10, micro_batches=4, micro_batch=1, digest="d")


class Measuring:
    """A slot whose template dies the first `deaths` times it measures."""

    def __init__(self, inbox: Inbox, deaths: int) -> None:
        self.inbox, self.deaths, self.asked = inbox, deaths, 0

    def measure(self, assignment: Any) -> int:
        self.asked += 1
        kind = w.ExitKind.TEMPLATE if self.asked <= self.deaths else w.ExitKind.MEASURED
        if kind is w.ExitKind.MEASURED:
            self.inbox.put(w.ProfileMeasured(slot=0, trainer=self.asked, profile=PROFILE))
        self.inbox.put(w.TrainerExited(slot=0, trainer=self.asked, kind=kind, step=-1, code=-9))
        return self.asked


def test_a_joiner_measures_again_when_its_template_dies() -> None:
    """The script is not to blame; but the tries are limited."""
    inbox: Inbox = queue.SimpleQueue()
    slot = Measuring(inbox, TRIES - 1)
    assert measure(cast(SlotPort, slot), assignment(measuring=True), inbox) == Measured(profile=PROFILE)
    assert slot.asked == TRIES
    with pytest.raises(TrainingFailed, match="ended without a profile"):
        measure(cast(SlotPort, Measuring(inbox, TRIES)), assignment(measuring=True), inbox)


def test_a_node_that_waits_at_the_gate_ends_when_a_slot_is_lost(tmp_path: Path) -> None:
    """It would join with a slot that starts no trainer. A signal ends the wait, and nothing else but the gate does."""
    inbox: Inbox = queue.SimpleQueue()
    inbox.put(w.SlotLost(slot=1, detail="its keeper is gone"))
    inbox.put(Signalled(15))
    with pytest.raises(MembershipError, match="slot 1 is lost: its keeper is gone"):
        wait_at_gate(str(tmp_path / "gate"), inbox)
    assert not wait_at_gate(str(tmp_path / "gate"), inbox)


def test_a_leaving_node_that_is_evicted_ends_cleanly() -> None:
    """The others evicted it before it could report leaving: no error. One that was to stay comes back."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    leaving = LeaveRequest(cast(Generations, None), None, events.put, journal=Journal(None, "run", "node"), drain=25.0)
    out = acts.Exit(failed=True, detail="the others went on without this node", rejoin=True)
    over = acts.Exit(failed=True, detail="the job failed")
    assert leaving.ended(out) == out
    leaving.drain(20.0, "spot notice")
    end = leaving.ended(out)
    assert (end.failed, end.rejoin) == (False, False)
    assert "the others went on without this node" in end.detail
    assert leaving.ended(over) == over


def test_a_trainers_lost_peer_error_is_kept(tmp_path: Path) -> None:
    """With its traceback: if no peer was lost after all, it is the only trace of the cause."""
    journal = Journal(str(tmp_path), "run", "node")
    exception = w.RaisedException(
        kind="RuntimeError", message="Connection reset by peer", traceback="in user.py line 7"
    )
    event = w.TrainerExited(
        slot=0, trainer=1, kind=w.ExitKind.PEER_LOST, step=3, code=82, exception=exception, detail="exited with code 82"
    )
    journal.trainer(event, 1, 0)
    journal.close()
    (line,) = map(json.loads, (tmp_path / "node-0.jsonl").read_text().splitlines())
    assert line["kind"] == "peer_lost"
    assert "exited with code 82: RuntimeError: Connection reset by peer" in line["error"]
    assert "in user.py line 7" in line["error"]


AGENT = """
import os, subprocess, sys, time
from elastic3d.rendezvous.guard import DONE, VARIABLE
guard = subprocess.Popen([sys.executable, "-S", "-E", sys.argv[1], str(os.getpid())], stdin=subprocess.PIPE, bufsize=0)
guard.stdin.write(sys.argv[2].encode() + b"\\n")
if sys.argv[3] == "clean":
    guard.stdin.write(DONE)
detached = subprocess.Popen(
    ["sleep", "600"], env=os.environ | {VARIABLE: sys.argv[2]}, start_new_session=True, stdout=subprocess.DEVNULL
)
print(guard.pid, detached.pid, flush=True)
time.sleep(600 if sys.argv[3] == "killed" else 0)
"""


@pytest.mark.parametrize("how", ["clean", "killed"])
def test_the_guard_spares_processes_left_after_a_clean_end(how: str) -> None:
    """Those of a dead agent are killed; those that a user detached from a run that ended in order are not."""
    token = secrets.token_hex(8)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(guard.__file__), token, how],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    with agent.stdout as said:
        guarding, detached = map(int, said.readline().split())
    if how == "killed":
        # No other user of this machine can read the token from its arguments.
        assert token not in Path(f"/proc/{guarding}/cmdline").read_text()
        agent.kill()
    agent.wait(30)
    try:
        assert eventually(lambda: gone(guarding), 30)
        assert gone(detached) == (how == "killed") or eventually(lambda: gone(detached) == (how == "killed"), 30)
    finally:
        if not gone(detached):
            os.kill(detached, 9)
