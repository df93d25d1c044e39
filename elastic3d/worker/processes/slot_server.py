"""A companion keeper's slot, served to the node's first keeper over a Unix socket; `remote` is the other end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM
from elastic3d.errors import StateError
from elastic3d.port import Assignment, Go
from elastic3d.snapshots import table as tables
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.listening import Listener, Refusal, Refusals
from elastic3d.trust.local import listen, receive, send, user_of
from elastic3d.values import from_json
from elastic3d.worker.processes.events import ConnectionRefused, SlotAlive, SlotEvent, SlotSignalled
from elastic3d.worker.processes.slot import LocalSlot
from elastic3d.worker.processes.slot_frames import EVENTS


class SlotServer:
    """Exposes this keeper's slot to the node's first keeper."""

    def __init__(self, slot: LocalSlot, events: queue.SimpleQueue[SlotEvent], name: str) -> None:
        """Listen under the abstract name. events: the queue the slot was created with; it is read here."""
        self._slot = slot
        self._events = events
        self._listener = listen(name)

    def serve(self, patience: float) -> None:
        """Serve the first keeper until its connection ends; give up if it does not connect within `patience` seconds.

        Runs on the main thread. From then on SIGTERM and SIGINT are passed to the first keeper, since the node leaves
        as one.
        """
        try:
            self._listener.settimeout(patience)
            with _accept(self._listener) as connection:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, self._signalled)
                slot = self._slot
                hello = {"index": slot.index, "tile_port": slot.tile_port, "lender": slot.lender, "pid": os.getpid()}
                send(connection, hello)
                self._listener.settimeout(None)
                threads.start(self._accept_pins, name="slot-pins")
                lock = threading.Lock()
                threads.start(self._forward, connection, lock, name="slot-events")
                with contextlib.suppress(OSError):
                    while (frame := receive(connection)) is not None and frame["call"] != "close":
                        self._obey(frame)
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _signalled(self, number: int, _frame: object) -> None:
        self._events.put(SlotSignalled(slot=self._slot.index, number=number))

    def _obey(self, frame: dict[str, Any]) -> None:
        slot = self._slot
        match frame["call"]:
            case "prepare":
                slot.prepare(from_json(Assignment, frame["assignment"]), trainer=frame["trainer"])
            case "go":
                slot.go(frame["trainer"], from_json(Go, frame["go"]))
            case "ask_leave":
                slot.ask_leave(frame["trainer"])
            case "follow":
                slot.follow(frame["trainer"], frame["on"])
            case "set_etcd_away":
                slot.set_etcd_away(frame["away"])
            case "set_ready":
                slot.set_ready(frame["ready"])
            case "stop":
                slot.stop(frame["trainer"])
            case "stop_all":
                slot.stop_all()
            case "set_buddy":
                slot.set_buddy(frame["address"])
            case "set_generation":
                slot.set_generation(frame["number"])
            case "set_credentials":
                slot.set_credentials(from_json(Credentials, frame["credentials"]))
            case "sealed":
                slot.sealed(frame["generation"], frame["ranks"])
            case "unpin":
                slot.unpin(frame["step"])
            case "ping":
                self._events.put(SlotAlive(slot=slot.index))
            case other:
                raise AssertionError(other)

    def _forward(self, connection: socket.socket, lock: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while True:
                event = self._events.get()
                name, body = EVENTS.to_json(event)
                with lock:
                    send(connection, {"event": name, "body": body})

    def _accept_pins(self) -> None:
        refused = Refusals(f"slot-{self._slot.index}", self._refused)
        listener = Listener(self._listener, refused)
        while (accepted := listener.accept()) is not None:
            if isinstance(accepted, float):
                SYSTEM.sleep(accepted)
                continue
            connection = accepted[0]
            connection.settimeout(None)
            user = user_of(connection)
            if user != os.geteuid():
                refused(f"user {user}", "is not the user that runs this job")
                connection.close()
                continue
            try:
                threads.start(self._serve_pin, connection, name="slot-pin", edge=threads.Edge.ALONE)
            except RuntimeError as error:
                refused("the first keeper of this node", f"{error}: it is served once there are threads again")
                connection.close()

    def _refused(self, refusal: Refusal) -> None:
        self._events.put(ConnectionRefused(slot=self._slot.index, refusal=refusal))

    def _serve_pin(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            frame = receive(connection)
            if frame is None:
                return
            try:
                with self._slot.segment(frame["pin"]) as (stored, descriptor):
                    pinned = {
                        "generation": stored.mark.generation,
                        "step": stored.mark.step,
                        "rank": stored.rank,
                        "world": stored.world,
                        "facts": dict(stored.facts),
                        "table": tables.to_wire(stored.table),
                        "digests": list(stored.digest_all()),
                    }
                    send(connection, {"pinned": pinned})
                    socket.send_fds(connection, [b"\0"], [descriptor])
                    connection.recv(1)
            except StateError as error:
                send(connection, {"error": str(error)})


def _accept(listener: socket.socket) -> socket.socket:
    """Return the next connection from a process of the same user."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(None)
        if user_of(connection) == os.geteuid():
            return connection
        connection.close()
