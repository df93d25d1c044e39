"""A node's part in the run's checkpoints, with a store that fails and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from checkpointing import open_store, read_latest
from checkpointing.format.tiles import Box, Piece, TensorSpec
from elastic3d.clock import SYSTEM
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import PinnedSnapshot, SlotPort
from elastic3d.worker.pulse import WELL, Figures
from tests.paths import ROOT
from tests.worker.checkpoints.test_uploader import generation

BYTES = 512 << 10


class Memory:
    """A slot that holds a snapshot of every step."""

    index = 0

    def __init__(self) -> None:
        self.ready: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def set_ready(self, ready: bool) -> None:
        self.ready.put(ready)

    @contextmanager
    def pieces(self, step: int) -> Iterator[PinnedSnapshot]:
        spec = TensorSpec(key="model/w", dtype="uint8", shape=(BYTES,))
        piece = Piece(spec=spec, box=Box(start=(0,), stop=(BYTES,)), data=memoryview(bytes([step]) * BYTES))
        yield PinnedSnapshot(generation=1, step=step, rank=0, world=1, facts={}, pieces=[piece])


class Scene:
    """One leading node, and its store."""

    def __init__(self, store: Path, events: Path, saving: Saving | None = None) -> None:
        self.store = open_store(str(store))
        self.events = events
        self.slot = Memory()
        self.figures = Figures()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.journal = Journal(str(events), "run", "node")
        self.checkpoints = Checkpoints(
            self.store,
            saving or Saving(),
            [cast(SlotPort, self.slot)],
            self.inbox.put,
            journal=self.journal,
            figures=self.figures,
            rest=lambda _: 0.01,
        )
        self.checkpoints.fence(1)

    def save(self, step: int) -> TilesUploaded | WriteFailed:
        """Write and, if that succeeded, commit a step; return when the next one is due."""
        self.checkpoints.offer(0, step, generation(1))
        said = self.inbox.get(timeout=10)
        assert isinstance(said, TilesUploaded | WriteFailed)
        saved = self.checkpoints.heard(said)
        if saved is not None:
            self.checkpoints.commit(saved, 1)
        assert self.slot.ready.get(timeout=15)
        return said

    def names(self) -> list[str]:
        """The events so far."""
        assert self.journal.flush(30)
        return [json.loads(line)["event"] for line in next(self.events.iterdir()).read_text().splitlines()]

    def health(self) -> str:
        """The node's report to people."""
        return self.figures.pulse("active", 1, SYSTEM.monotonic()).health

    def close(self) -> None:
        self.checkpoints.close_uploaders(10.0)
        self.checkpoints.close_committer(10.0)
        self.journal.close()


HANGS = """
import os, sys, threading
from pathlib import Path
from tests.worker.checkpoints.test_checkpoints import Scene, generation

scene = Scene(Path(sys.argv[1]) / "store", Path(sys.argv[1]) / "events")
never, kept = os.pipe()
begun = threading.Event()

def put(name, data, *, check=False):
    begun.set()
    os.read(never, 1)

scene.store.put = put
scene.checkpoints.offer(0, 7, generation(1))
assert begun.wait(30)
scene.checkpoints.close_uploaders(0.1)
scene.checkpoints.close_committer(10.0)
scene.journal.close()
print("closed", flush=True)
"""


def test_a_node_ends_though_its_store_does_not_answer(tmp_path: Path) -> None:
    """It says which write it leaves; no thread that waits for the store is waited for."""
    with subprocess.Popen([sys.executable, "-c", HANGS, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        try:
            assert node.stdout.readline() == b"closed\n"
            assert node.wait(20) == 0
        finally:
            node.kill()
    lines = (tmp_path / "events" / "node-0.jsonl").read_text().splitlines()
    (said,) = [event for event in map(json.loads, lines) if event["event"] == "checkpoint.abandoned"]
    assert (said["step"], said["slot"]) == (7, 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system takes root and tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Write until there is no room for a page."""
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_stops_checkpoints_until_there_is_space(
    small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is reported once, with what to do; the next checkpoint after space was made is committed."""
    scene = Scene(small_disk / "store", tmp_path / "events")
    try:
        assert isinstance(scene.save(1), TilesUploaded)
        ballast = small_disk / "ballast"
        fill(ballast)
        for step in (2, 3, 4):
            said = scene.save(step)
            assert isinstance(said, WriteFailed)
            assert "free" in said.error
        assert scene.health().startswith("checkpoint of step 4 failed")
        ballast.unlink()
        assert isinstance(scene.save(5), TilesUploaded)
        assert scene.health() == WELL
    finally:
        scene.close()
    latest = read_latest(scene.store)
    assert latest is not None
    assert latest.step == 5
    assert scene.names().count("checkpoint.failed") == 3
    assert scene.names().count("checkpoint.mended") == 1
    said_aloud = capfd.readouterr().err
    assert said_aloud.count("checkpoint.failed") == 1
    assert said_aloud.count("checkpoint.mended") == 1


def test_a_missing_store_stops_checkpoints_until_it_is_back(tmp_path: Path) -> None:
    """As if a share had been unmounted; earlier commits still count."""
    scene = Scene(tmp_path / "store", tmp_path / "events")
    try:
        assert isinstance(scene.save(1), TilesUploaded)
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("in its place")
        assert isinstance(scene.save(2), WriteFailed)
        (tmp_path / "store").unlink()
        (tmp_path / "away").rename(tmp_path / "store")
        assert isinstance(scene.save(3), TilesUploaded)
    finally:
        scene.close()
    latest = read_latest(scene.store)
    assert latest is not None
    assert latest.step == 3
    assert scene.names().count("checkpoint.committed") == 2


def test_an_emptied_store_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """An unmounted share looks like that: nothing is written there, and the error says what to do."""
    scene = Scene(tmp_path / "store", tmp_path / "events")
    try:
        assert isinstance(scene.save(1), TilesUploaded)
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").mkdir()
        said = scene.save(2)
        assert isinstance(said, WriteFailed)
        assert "Mount it" in said.error
        assert not list((tmp_path / "store").rglob("*.manifest"))
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "away").rename(tmp_path / "store")
        assert isinstance(scene.save(3), TilesUploaded)
    finally:
        scene.close()


def test_the_status_shows_the_age_of_checkpoints(tmp_path: Path) -> None:
    """Of the newest committed and the newest verified one."""
    scene = Scene(tmp_path / "store", tmp_path / "events")
    try:
        scene.save(1)
    finally:
        scene.close()
    pulse = scene.figures.pulse("active", 1, SYSTEM.monotonic() + 7.0)
    assert (pulse.checkpoint_step, pulse.verified_step) == (1, 1)
    assert pulse.checkpoint_age >= pulse.verified_age >= 7.0


def test_a_store_above_its_size_limit_is_reported(tmp_path: Path) -> None:
    """Once, in an event and in `status`, for as long as it lasts; checkpoints go on."""
    scene = Scene(tmp_path / "store", tmp_path / "events", Saving(keep_bytes=1000))
    for step in (1, 2):
        assert isinstance(scene.save(step), TilesUploaded)
        until = SYSTEM.monotonic() + 60
        while "store.limit_exceeded" not in scene.names() and SYSTEM.monotonic() < until:
            SYSTEM.sleep(0.05)
    assert "above keep_bytes=1000" in scene.health()
    scene.close()
    assert scene.names().count("store.limit_exceeded") == 1
    assert "checkpoint.failed" not in scene.names()
