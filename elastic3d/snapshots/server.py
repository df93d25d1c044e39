"""The tile server of a slot: anybody of the run may fetch from it, and others' snapshots arrive at it.

A thread for each connection: there are few, each moves long runs of bytes, and hashing and socket calls leave the
interpreter free. Every wait has a limit: a peer that dies or falls silent costs its own thread a few seconds.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from elastic3d import threads
from elastic3d.snapshots import memory, wire
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import Arriving, SnapshotMemory, Stored
from elastic3d.snapshots.wire import WireError

_DIGEST_BYTES = 32


class TileServer:
    """Serves one slot's memory on `host`, on a port of the system's choice."""

    def __init__(self, memory: SnapshotMemory, *, host: str, run_id: str, name: str = "tiles") -> None:
        self._memory = memory
        self._run_id = run_id
        self._name = name
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=256)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        threads.start(self._accept, name=name)

    def close(self) -> None:
        """Stop serving; connections end where they are."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        # Shutting down wakes the thread that accepts; closing alone would not.
        for one in (self._listener, *connections):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threads.start(self._serve, connection, name=f"{self._name}-peer", edge=threads.Edge.ALONE)

    def _serve(self, connection: socket.socket) -> None:
        try:
            wire.tune(connection)
            writer = self._greet(connection)
            if writer is None:
                return
            while True:
                # Between requests a peer may think as long as it likes, while it lives.
                connection.settimeout(None)
                _keep_alive(connection)
                request = wire.receive(connection)
                connection.settimeout(wire.SILENCE_SECONDS)
                self._answer(connection, request, writer=writer)
        except WireError:
            pass
        except (KeyError, TypeError, ValueError, IndexError) as error:
            try:
                wire.send(connection, {"error": f"not a request: {error!r}"})
            except WireError:
                pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> bool | None:
        """Return whether the peer may write here, None where it may not even read."""
        hello = wire.receive(connection)
        if hello.get("op") != "hello" or hello.get("version") != wire.VERSION:
            wire.send(connection, {"error": f"speaks another version of the tile protocol than {wire.VERSION}"})
            return None
        run_id = hello.get("run")
        if run_id not in (None, self._run_id):
            wire.send(connection, {"error": "belongs to another run"})
            return None
        wire.send(connection, {"ok": True})
        return run_id is not None

    def _answer(self, connection: socket.socket, request: dict[str, Any], *, writer: bool) -> None:
        match request["op"]:
            case "inventory":
                self._inventory(connection)
            case "fetch":
                self._fetch(connection, request["ranges"])
            case "replicate" if writer:
                self._receive(connection, request)
            case other:
                raise ValueError(other)

    def _inventory(self, connection: socket.socket) -> None:
        offered = self._memory.offered()
        wire.send(
            connection,
            {
                "tables": {one.cut.identity: tables.to_wire(one.cut) for one in offered},
                "snapshots": [
                    {
                        "generation": one.mark.generation,
                        "step": one.mark.step,
                        "rank": one.rank,
                        "world": one.world,
                        "facts": one.facts,
                        "table": one.cut.identity,
                        "digests": "".join(one.digests),
                    }
                    for one in offered
                ],
            },
        )

    def _fetch(self, connection: socket.socket, ranges: list[list[int]]) -> None:
        found: list[memoryview | None] = []
        snapshots: dict[tuple[int, int, int], Stored | None] = {}
        for generation, step, rank, offset, nbytes in ranges:
            name = (generation, step, rank)
            if name not in snapshots:
                snapshots[name] = self._memory.find(*name)
            stored = snapshots[name]
            inside = stored is not None and 0 <= offset <= offset + nbytes <= len(stored.data)
            found.append(stored.data[offset : offset + nbytes] if stored is not None and inside else None)
        wire.send(connection, {"sizes": [-1 if data is None else len(data) for data in found]})
        _send_many(connection, [data for data in found if data])

    def _receive(self, connection: socket.socket, request: dict[str, Any]) -> None:
        identity = str(request["identity"])
        if request["table"] is not None:
            table = tables.from_wire(request["table"])
            if table.identity != identity:
                raise ValueError("the table is not the one named")
            self._memory.learn(table)
        mark = Mark(int(request["generation"]), int(request["step"]))
        try:
            arriving = self._memory.arriving(
                mark,
                rank=int(request["rank"]),
                world=int(request["world"]),
                facts=dict(request["facts"]),
                table=identity,
                keep=[int(step) for step in request["keep"]],
            )
        except tables.UnknownTable:
            wire.send(connection, {"table": True})
            return
        if arriving is None:
            wire.send(connection, {"stale": True})
            return
        good = False
        try:
            wire.send(connection, {"ok": True})
            good = _receive_snapshot(connection, arriving)
        finally:
            if not good:
                self._memory.lost(arriving)
        if not good:
            wire.send(connection, {"error": "a tile's bytes do not have its digest"})
        elif self._memory.arrived(arriving):
            wire.send(connection, {"held": True})
        else:
            wire.send(connection, {"stale": True})


def _receive_snapshot(connection: socket.socket, arriving: Arriving) -> bool:
    """Fill a snapshot and verify it; return whether every tile was good, having read them all."""
    stored, good = arriving.stored, True
    for first, stop in stored.runs:
        told = bytes(wire.receive_bytes(connection, (stop - first) * _DIGEST_BYTES)).hex()
        low, high = stored.span(first, stop)
        wire.receive_into(connection, stored.data[low:high])
        found = memory.digests(stored.cut, stored.data, first, stop)
        stored.digests[first:stop] = found
        good = good and "".join(found) == told
    return good


def _send_many(connection: socket.socket, views: list[memoryview]) -> None:
    """Send many views, neighbours in memory and small ones together."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        if len(view) >= 1 << 16:
            if batch:
                wire.send_bytes(connection, b"".join(batch))
                batch, size = [], 0
            wire.send_bytes(connection, view)
            continue
        batch.append(view)
        size += len(view)
        if size >= 1 << 20:
            wire.send_bytes(connection, b"".join(batch))
            batch, size = [], 0
    if batch:
        wire.send_bytes(connection, b"".join(batch))


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice a peer that vanished between requests."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
