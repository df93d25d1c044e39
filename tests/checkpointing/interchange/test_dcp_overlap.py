"""Overlapping saves with one Writer: each has its own step and tensors, and the newest step is `latest`."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from checkpointing import open_checkpoint, open_store
from checkpointing.errors import Superseded
from checkpointing.interchange import Reader, Writer
from tests.checkpointing.interchange import mains
from tests.checkpointing.interchange.worlds import run_ranks

pytestmark = pytest.mark.long

WAIT = 120


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield


class Held(DefaultSavePlanner):
    """A planner whose save, once begun, waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def create_local_plan(self) -> Any:
        self.begun.set()
        assert self.go.wait(WAIT)
        return super().create_local_plan()


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step)), "note": f"of {step}"}


def check(url: Path, steps: list[int]) -> None:
    """Check that the steps are committed, each with its own tensors and objects, and that the last is `latest`."""
    for step in steps:
        loaded = {"w": torch.zeros(3), "note": ""}
        dcp.load(loaded, storage_reader=Reader(str(url), str(step)))
        assert loaded["note"] == f"of {step}"
        assert torch.equal(loaded["w"], state(step)["w"])
    assert open_checkpoint(open_store(str(url), write=False)).step == steps[-1]


def cause(failed: Future[Any]) -> BaseException:
    error = failed.exception(WAIT)
    assert isinstance(error, dcp.CheckpointException)
    (failure,) = error.failures.values()
    return failure[0]


def asked(writer: Writer, step: int, planner: DefaultSavePlanner | None = None) -> Future[Any]:
    saving = dcp.async_save(state(step), storage_writer=writer, checkpoint_id=str(step), planner=planner)
    assert isinstance(saving, Future)
    return saving


def test_overlapping_saves_wait_for_their_turn(tmp_path: Path) -> None:
    """Neither is lost, and neither has the other's tensors."""
    writer, held = Writer(tmp_path), Held()
    first = asked(writer, 1, held)
    assert held.begun.wait(WAIT)
    others = [asked(writer, step) for step in (2, 3)]
    held.go.set()
    for save in (first, *others):
        save.result(WAIT)
    check(tmp_path, [1, 2, 3])


def test_saves_may_share_a_planner(tmp_path: Path) -> None:
    """It is given the second state while the first is being saved."""
    writer, held = Writer(tmp_path), Held()
    saves = [asked(writer, step, held) for step in (1, 2)]
    assert held.begun.wait(WAIT)
    held.go.set()
    for save in saves:
        save.result(WAIT)
    check(tmp_path, [1, 2])


def test_saves_keep_the_order_of_their_copies(tmp_path: Path) -> None:
    """Not that in which their threads were scheduled."""
    writer = Writer(tmp_path)
    copies = {step: writer.stage(state(step)) for step in (1, 2, 3)}
    begun = threading.Event()

    def save(step: int) -> None:
        if step == 3:
            begun.set()
        dcp.save(copies.pop(step), storage_writer=writer, checkpoint_id=str(step))

    with ThreadPoolExecutor(3) as pool:
        last = pool.submit(save, 3)
        assert begun.wait(WAIT)
        rest = [pool.submit(save, step) for step in (2, 1)]
        for done in (last, *rest):
            done.result(WAIT)
    check(tmp_path, [1, 2, 3])


def test_a_foreground_save_waits_for_background_saves(tmp_path: Path) -> None:
    """So `dcp.save` at the end of a run is the newest, whatever was under way."""
    writer, held = Writer(tmp_path), Held()
    first = asked(writer, 1, held)
    assert held.begun.wait(WAIT)
    threading.Timer(0.2, held.go.set).start()
    dcp.save(state(2), storage_writer=writer, checkpoint_id="2")
    first.result(WAIT)
    check(tmp_path, [1, 2])


def test_an_older_step_saved_after_a_newer_one_is_superseded(tmp_path: Path) -> None:
    """Whatever the order of overlapping saves, the newest is `latest`, and the other one's future says so."""
    writer, held = Writer(tmp_path), Held()
    newer = asked(writer, 2, held)
    assert held.begun.wait(WAIT)
    older = asked(writer, 1)
    held.go.set()
    newer.result(WAIT)
    assert isinstance(cause(older), Superseded)
    check(tmp_path, [2])
    # The thread of a save that failed ends a moment after its future has.
    last = writer._turns._last
    assert last is not None
    last.wait()
    # Once nothing is under way, an older step means that training went back.
    asked(writer, 1).result(WAIT)
    check(tmp_path, [2, 1])


def test_a_failed_save_does_not_block_the_next(tmp_path: Path) -> None:
    """Nor does a copy that was never saved."""

    class Failing(Held):
        def create_local_plan(self) -> Any:
            super().create_local_plan()
            raise ValueError("cannot be planned")

    writer, held = Writer(tmp_path), Failing()
    writer.stage(state(7))
    failing = asked(writer, 1, held)
    after = asked(writer, 2)
    held.go.set()
    assert "cannot be planned" in str(cause(failing))
    after.result(WAIT)
    check(tmp_path, [2])


def test_saves_in_user_threads_run_concurrently(tmp_path: Path) -> None:
    """Each has its own state, and `latest` never goes back."""
    writer, held = Writer(tmp_path), Held()
    writer_held = {"storage_writer": writer, "planner": held}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(dcp.save, state(1), checkpoint_id="1", **writer_held)
        assert held.begun.wait(WAIT)
        pool.submit(dcp.save, state(2), storage_writer=writer, checkpoint_id="2").result(WAIT)
        held.go.set()
        assert isinstance(cause(first), Superseded)
    check(tmp_path, [2])


@pytest.mark.gloo
@pytest.mark.usefixtures("server")
def test_overlapping_saves_of_several_ranks_do_not_mix(tmp_path: Path) -> None:
    """Nor do their collectives, whichever thread begins first on which rank."""
    run_ranks(mains.save_overlapping, 2, str(tmp_path))
    for step in (1, 2, 3):
        loaded = {"w": torch.zeros(4)}
        dcp.load(loaded, storage_reader=Reader(str(tmp_path), str(step)))
        assert torch.equal(loaded["w"], torch.full((4,), float(step)))
    assert open_checkpoint(open_store(str(tmp_path), write=False)).step == 3


@pytest.mark.gloo
def test_saves_in_a_separate_process_keep_their_order(tmp_path: Path) -> None:
    """The last one requested is `latest`."""
    script = [sys.executable, "-m", "tests.checkpointing.interchange.process_saves", str(tmp_path)]
    done = subprocess.run(script, timeout=280, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(tmp_path, [1, 2, 3, 4])


def test_copies_are_sent_to_a_process_in_order(tmp_path: Path) -> None:
    """A thread with a later one waits until the thread that sends the earlier one has ended."""
    writer, sent = Writer(tmp_path), []
    copies = {step: writer.stage(state(step)) for step in (1, 2)}
    begun, answered = threading.Event(), threading.Event()

    def send(step: int) -> None:
        begun.set()
        pickle.dumps(copies[step])
        sent.append(step)
        if step == 1:
            answered.wait(WAIT)
            sent.append("answer")

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        later = one.submit(send, 2)
        assert begun.wait(WAIT)
        earlier = other.submit(send, 1)
        threading.Timer(0.2, answered.set).start()
        earlier.result(WAIT)
        other.shutdown()
        later.result(WAIT)
    assert sent == [1, "answer", 2]


def test_a_copy_is_sent_as_its_contents() -> None:
    """The process that saves it has no turns."""
    writer = Writer("/nowhere")
    assert type(pickle.loads(pickle.dumps(writer.stage({"a": 1})))) is dict


def test_overwriting_can_be_forbidden(tmp_path: Path) -> None:
    """As in torch's own writer, but by step instead of path."""
    writer = Writer(tmp_path, overwrite=False)
    for step in ("1", "2"):
        dcp.save(state(int(step)), storage_writer=writer, checkpoint_id=step)
    for again in (writer, Writer(tmp_path, overwrite=False)):
        with pytest.raises(dcp.CheckpointException, match="step 1 was committed before"):
            dcp.save(state(9), storage_writer=again, checkpoint_id="1")
    check(tmp_path, [1, 2])
