"""Slots of the node's other keepers, as the first keeper sees them: the same calls and events, over a Unix socket.

A companion keeper listens under an abstract name (it is gone with its process and leaves nothing to clean up) and
leaves when the first keeper's connection ends. An abstract name has no permissions: both ends therefore ask the kernel
for the user of the other process, and names cannot be guessed from those that can be seen (`private_name`). Frames are
a length and a JSON object. A pinned snapshot has a connection of its own, over which the descriptor of its memory is
passed: nothing is copied, and whatever ends the connection ends the pin.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM
from elastic3d.errors import MembershipError, StateError
from elastic3d.port import Assignment, Go
from elastic3d.snapshots import memory
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.arena import Arena
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.local import connect, frame_of, receive, send
from elastic3d.values import to_json
from elastic3d.worker.processes.events import SlotAlive, SlotEvent, SlotLost
from elastic3d.worker.processes.slot import PinnedSnapshot
from elastic3d.worker.processes.slot_frames import EVENTS

_CLOSE_SECONDS = 5.0
_GONE = "the companion keeper is gone; use another copy"
_NO_FILES = "this process may open no more files; raise `ulimit -n`, or try again once it has fewer open"
_PING = frame_of({"call": "ping"})

INTERVAL = 0.5
"""Seconds between two checks whether a companion keeper is there."""

SILENCE = 10.0
"""Seconds without an answer after which it is killed. It is on this host: a delay here is a delay there."""

PAUSE = 0.5
"""Seconds by which this process may itself be late before that time is taken off the companion's silence."""


class RemoteSlot:
    """The slot of a companion keeper; see `slot.SlotPort`. Events arrive in the queue given here."""

    def __init__(
        self, name: str, events: queue.SimpleQueue[SlotEvent], *, patience: float, silence: float = SILENCE
    ) -> None:
        """Connect to the `SlotServer` of this abstract name; MembershipError if it does not answer within `patience` s.

        silence: seconds without an answer after which the companion is killed, and the slot lost.
        """
        self._name = name
        self._events = events
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = self._killed = False
        self._connection = _connect(name, patience)
        hello = receive(self._connection)
        if hello is None:
            raise MembershipError(
                "another process of this node left before it was asked for anything: its own output says why. Trying "
                "again helps once that is mended"
            )
        self.index: int = hello["index"]
        self._pid: int = hello["pid"]
        self._tile_port: int = hello["tile_port"]
        self._lender: str = hello["lender"]
        self._silence, self._heard_at = silence, SYSTEM.monotonic()
        self._process = os.pidfd_open(self._pid)
        self._left = threading.Event()
        self._reader = threads.start(
            self._read, name=f"remote-slot-{self.index}", edge=threads.Edge.ALONE, failed=self._broken
        )

        self._watcher = threads.start(self._watch, name=f"remote-slot-{self.index}-watch")

    @property
    def pid(self) -> int:
        """The pid of the companion keeper."""
        return self._pid

    @property
    def tile_port(self) -> int:
        """TCP port of the slot's tile server."""
        return self._tile_port

    @property
    def lender(self) -> str:
        """Abstract name of the socket where the slot's memory is lent."""
        return self._lender

    def measure(self, assignment: Assignment) -> int:
        """Fork a trainer that reports the model's profile and ends; return its number."""
        assert assignment.measuring
        return self.prepare(assignment)

    def prepare(self, assignment: Assignment) -> int:
        """Fork a trainer now, beside any that runs; return its number."""
        number = next(self._numbers)
        self._call("prepare", trainer=number, assignment=to_json(assignment))
        return number

    def go(self, trainer: int, go: Go) -> None:
        """Let a prepared trainer restore and train."""
        self._call("go", trainer=trainer, go=to_json(go))

    def ask_leave(self, trainer: int) -> None:
        """Raise the trainer's leave flag."""
        self._call("ask_leave", trainer=trainer)

    def follow(self, trainer: int, on: bool) -> None:
        """Report what the trainer is at, or no longer."""
        self._call("follow", trainer=trainer, on=on)

    def set_etcd_away(self, away: bool) -> None:
        """Set the flag every trainer of this slot carries into the step vote."""
        self._call("set_etcd_away", away=away)

    def set_ready(self, ready: bool) -> None:
        """Set whether another checkpoint would be taken."""
        self._call("set_ready", ready=ready)

    def stop(self, trainer: int) -> None:
        """SIGKILL the trainer's whole process group."""
        self._call("stop", trainer=trainer)

    def stop_all(self) -> None:
        """`stop` every trainer."""
        self._call("stop_all")

    def set_buddy(self, address: str | None) -> None:
        """Copy snapshots to the tile server at "host:port" from now on."""
        self._call("set_buddy", address=address)

    def set_generation(self, number: int) -> None:
        """Refuse replicas of any older generation from now on."""
        self._call("set_generation", number=number)

    def set_credentials(self, credentials: Credentials) -> None:
        """Show these to other nodes, and serve those that hold the same secret."""
        self._call("set_credentials", credentials=to_json(credentials))

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take replicas of a generation from these nodes."""
        self._call("sealed", generation=generation, ranks=list(ranks))

    def unpin(self, step: int) -> None:
        """Let go of a snapshot taken for a checkpoint without writing it."""
        self._call("unpin", step=step)

    @contextlib.contextmanager
    def pieces(self, step: int) -> Iterator[PinnedSnapshot]:
        """Pin the newest home snapshot of `step` while the context is open; StateError if it is not held."""
        with connect(self._name) as connection:
            send(connection, {"pin": step})
            answer = receive(connection)
            if answer is None or "error" in answer:
                raise StateError(answer["error"] if answer else _GONE)
            pinned = answer["pinned"]
            table = tables.from_wire(pinned["table"])
            data, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not descriptors:
                raise StateError(_NO_FILES if data else _GONE)  # the kernel leaves out what may not be opened
            arena = Arena(descriptors[0])
            try:
                yield PinnedSnapshot(
                    generation=pinned["generation"],
                    step=pinned["step"],
                    rank=pinned["rank"],
                    world=pinned["world"],
                    facts=pinned["facts"],
                    pieces=memory.pieces(table, arena.view(table.nbytes), pinned["digests"]),
                )
            finally:
                arena.close()
                # The companion lets go of it only when it sees the connection end. Until then it would refuse a pin of
                # another step, and not keep the snapshot of a checkpoint that it is asked for.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)

    def close(self) -> None:
        """Have the companion keeper leave. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._left.set()
        self._call("close")
        self._reader.join(_CLOSE_SECONDS)
        self._watcher.join(_CLOSE_SECONDS)
        os.close(self._process)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _call(self, name: str, **arguments: Any) -> None:
        # The reader reports a companion that is gone, once.
        with self._lock, contextlib.suppress(OSError):
            send(self._connection, {"call": name, **arguments})

    def _watch(self) -> None:
        """Check whether the companion is there, and kill it if it does not answer, since it holds up every rank.

        Time in which this process did not run is not counted.
        """
        turned_at = SYSTEM.monotonic()
        while not self._left.wait(INTERVAL):
            now = SYSTEM.monotonic()
            late = now - turned_at - INTERVAL
            if late >= PAUSE:
                self._heard_at += late
            turned_at = now
            silent = now - self._heard_at
            if silent >= self._silence:
                self._kill(silent)
                return
            # A call may hold the lock while the companion reads nothing: that is no reason to wait here.
            if self._lock.acquire(timeout=INTERVAL):
                try:
                    self._connection.send(_PING, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # what it has not read yet will show whether it answers
                except OSError:
                    return  # the reader reports it
                finally:
                    self._lock.release()

    def _kill(self, silent: float) -> None:
        self._killed = True
        detail = f"its keeper has not answered for {silent:.1f} s: it was stopped or hung, and has been killed"
        self._events.put(SlotLost(slot=self.index, detail=detail))
        try:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _broken(self, error: BaseException) -> None:
        self._events.put(SlotLost(slot=self.index, detail=f"what the keeper of slot {self.index} says: {error!r}"))

    def _read(self) -> None:
        try:
            while (frame := receive(self._connection)) is not None:
                self._heard_at = SYSTEM.monotonic()
                event = EVENTS.from_json(frame["event"], frame["body"])
                if not isinstance(event, SlotAlive):
                    self._events.put(event)
        except OSError:
            pass
        self._left.set()
        if not self._closed and not self._killed:
            self._events.put(SlotLost(slot=self.index, detail=f"the keeper of slot {self.index} is gone"))


def _connect(name: str, patience: float) -> socket.socket:
    deadline = SYSTEM.monotonic() + patience
    while True:
        try:
            return connect(name)
        except OSError as error:
            if SYSTEM.monotonic() > deadline:
                raise MembershipError(
                    f"another process of this node did not answer in {patience:g} s ({error}): its own output says "
                    "what it is at. Trying again helps where the node was only slow"
                ) from error
            SYSTEM.sleep(0.02)
