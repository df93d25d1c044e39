"""A companion keeper's slot as others of its node reach it."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from elastic3d import threads
from elastic3d.errors import StateError
from elastic3d.trust.local import connect, receive, send
from elastic3d.worker.processes.events import ConnectionRefused, SlotEvent
from elastic3d.worker.processes.slot import LocalSlot
from elastic3d.worker.processes.slot_server import SlotServer


class EmptySlot:
    """A slot that holds no snapshot."""

    index = 1

    @contextlib.contextmanager
    def segment(self, step: int) -> Iterator[Any]:
        raise StateError(f"no snapshot of step {step}")
        yield


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
