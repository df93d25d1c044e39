"""A companion keeper's slot as others of its node reach it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from elastic3d import threads
from elastic3d.errors import StateError
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import SnapshotMemory, Stored
from elastic3d.trust.local import connect, receive, send
from elastic3d.worker.processes.events import ConnectionRefused, SlotEvent
from elastic3d.worker.processes.remote import RemoteSlot
from elastic3d.worker.processes.slot import LocalSlot
from elastic3d.worker.processes.slot_server import SlotServer


class EmptySlot:
    """A slot that holds no snapshot."""

    index = 1

    @contextlib.contextmanager
    def segment(self, step: int) -> Iterator[Any]:
        raise StateError(f"no snapshot of step {step}")
        yield


class LateSlot:
    """A slot with the snapshots of two steps, on a machine where the end of a pin is noticed late."""

    index, tile_port, lender = 1, 1, "nobody"

    def __init__(self) -> None:
        self.memory = memory = SnapshotMemory()
        table = tables.lay_out([])
        memory.learn(table)
        memory.grant()
        for buffer, step in enumerate((5, 6)):
            mark = Mark(1, step)
            memory.written(buffer, mark, rank=0, world=1, facts={}, table=table.identity, checkpoint=step == 5)

    @contextlib.contextmanager
    def segment(self, step: int) -> Iterator[tuple[Stored, int]]:
        with self.memory.pinned(step) as stored:
            yield stored, self.memory.descriptor_of(stored)
            time.sleep(0.3)


def test_a_pin_is_over_when_its_context_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last snapshot of a node that leaves is written right after the one before it."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it is served beside the main thread
    name = f"elastic3d-test-{os.urandom(8).hex()}"
    late = LateSlot()
    server = SlotServer(cast(LocalSlot, late), queue.SimpleQueue(), name)
    serving = threads.start(server.serve, 20.0, name="slot-server")
    slot = RemoteSlot(name, queue.SimpleQueue(), patience=20.0)
    try:
        steps = []
        for step in (5, 6):
            with slot.pieces(step) as pinned:
                steps.append(pinned.step)
        assert steps == [5, 6]
    finally:
        slot.close()
        serving.join(20)
        late.memory.close()


@pytest.mark.parametrize(
    ("sends", "error"),
    [(False, "the companion keeper is gone"), (True, "may open no more files")],
    ids=["companion-gone", "too-many-files"],
)
def test_a_pin_whose_memory_does_not_arrive_is_refused(
    monkeypatch: pytest.MonkeyPatch, sends: bool, error: str
) -> None:
    """The companion ends after its answer, or this process has too many files open: the write fails as any other."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it is served beside the main thread

    def without(connection: socket.socket, buffers: list[bytes], descriptors: list[int]) -> None:
        if not sends:
            raise ConnectionResetError
        connection.sendall(b"".join(buffers))

    monkeypatch.setattr(socket, "send_fds", without)
    name = f"elastic3d-test-{os.urandom(8).hex()}"
    late = LateSlot()
    server = SlotServer(cast(LocalSlot, late), queue.SimpleQueue(), name)
    serving = threads.start(server.serve, 20.0, name="slot-server")
    slot = RemoteSlot(name, queue.SimpleQueue(), patience=20.0)
    try:
        with pytest.raises(StateError, match=error), slot.pieces(5):
            pass
    finally:
        slot.close()
        serving.join(20)
        late.memory.close()


def test_a_pin_for_which_there_is_no_thread_is_refused_and_the_next_one_served(
    reported: queue.SimpleQueue[threads.ThreadFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper lives on: who wants the snapshot tries again."""
    name, events = f"elastic3d-test-{os.urandom(8).hex()}", queue.SimpleQueue[SlotEvent]()
    server = SlotServer(cast(LocalSlot, EmptySlot()), events, name)
    accepting = threads.start(server._accept_pins, name="slot-pins")

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", exhausted)
            with connect(name, 20) as refused:
                assert receive(refused) is None
        event = events.get(timeout=20)
        assert isinstance(event, ConnectionRefused)
        assert "can't start new thread" in event.refusal.reason
        with connect(name, 20) as served:
            send(served, {"pin": 7})
            assert receive(served) == {"error": "no snapshot of step 7"}
    finally:
        with contextlib.suppress(OSError):
            server._listener.shutdown(socket.SHUT_RDWR)
        server._listener.close()
        accepting.join(20)
    assert reported.empty()
