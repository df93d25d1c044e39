"""The tile server of a slot: members of the run fetch from it, and send the snapshots of other ranks to it.

Each connection has a thread: there are few, each moves long runs of bytes, and hashing and socket calls leave the
interpreter free. Every wait has a limit: a peer that dies or falls silent costs its own thread a few seconds. Nothing
is read or written for a peer that has not proved to belong to the run, and a replica is accepted only from the node
that holds its rank by the sealed record (`permits`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM
from elastic3d.snapshots import memory, wire
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.holdings import Mark, Origin
from elastic3d.snapshots.memory import Arriving, NoRoom, SnapshotMemory, Stored
from elastic3d.snapshots.permits import OfferVerdict, Permits
from elastic3d.trust import handshake
from elastic3d.trust.channel import Channel, Deadline, WireError, answer, shut
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import agree, serve_encrypted
from elastic3d.trust.handshake import HandshakeRejected, PortRole
from elastic3d.trust.listening import BACKLOG, Listener, Refusal, Refusals, Waiting, most_known

_DIGEST_BYTES = 32

ALTERED = "a tile's bytes do not have its digest"
"""What is wrong with a replica of which a tile was sent with another digest than it has."""


@dataclass(slots=True, eq=False)
class _Guest:
    """A connection. `socket` is replaced when the connection becomes encrypted."""

    socket: socket.socket
    address: str


class Denied(Exception):
    """A peer asks for something that it may not do."""


class TileServer:
    """Serves one slot's memory on `host`, on a port of the system's choice.

    refused: called with each refused connection, on one of the server's threads; it must not block.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        *,
        host: str,
        refused: Callable[[Refusal], None] = lambda refusal: None,
        name: str = "tiles",
    ) -> None:
        self._memory = memory
        self._name = name
        self._refused = Refusals(name, refused)
        listening = socket.create_server((host, 0), family=_family(host), backlog=BACKLOG)
        self._listener = Listener(listening, self._refused)
        self._lock = threading.Lock()
        self._credentials: Credentials | None = None
        self._permits = Permits()
        self._guests: set[_Guest] = set()
        self._waiting: Waiting[_Guest] = Waiting()
        self._closed = False
        self.port: int = self._listener.port
        threads.start(self._accept, name=name)

    def set_credentials(self, credentials: Credentials) -> None:
        """Serve those that hold this secret from now on; before the first call none is served."""
        with self._lock:
            self._credentials = credentials

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take replicas of a generation from these nodes: the `Node.id` of each rank, as its sealed record says."""
        with self._lock:
            self._permits.sealed(generation, ranks)

    def close(self) -> None:
        """Stop serving; connections end where they are."""
        with self._lock:
            self._closed = True
            guests = list(self._guests)
        # Shutting down wakes the accepting thread, which then closes the socket; closing alone would not wake it.
        for one in (self._listener.socket, *(guest.socket for guest in guests)):
            shut(one)

    def _accept(self) -> None:
        while not self._closed:
            accepted = self._listener.accept()
            if accepted is None:
                break
            if isinstance(accepted, float):
                SYSTEM.sleep(accepted)
                continue
            guest = _Guest(*accepted)
            if not self._admit(guest):
                continue
            try:
                threads.start(self._serve, guest, name=f"{self._name}-peer", edge=threads.Edge.ALONE)
            except RuntimeError as error:
                self._refused(guest.address, f"{error}: connections are closed until there are threads again")
                self._end(guest)
        self._listener.close()

    def _admit(self, guest: _Guest) -> bool:
        with self._lock:
            full = self._closed or len(self._guests) - len(self._waiting) >= most_known()
            crowded = None
            if not full:
                self._guests.add(guest)
                crowded = self._waiting.add(guest, guest.address)
        if full:
            self._refused(guest.address, "too many connections of this run's own stand already")
            guest.socket.close()
        elif crowded is not None:
            self._refused(crowded.address, "too many connections that have not proved themselves")
            shut(crowded.socket)
        return not full

    def _end(self, guest: _Guest) -> None:
        with self._lock:
            self._guests.discard(guest)
            self._waiting.remove(guest)
        guest.socket.close()

    def _serve(self, guest: _Guest) -> None:
        try:
            channel = self._greet(guest)
            with self._lock:
                self._waiting.remove(guest)
            _keep_alive(guest.socket)
            self._answer_all(channel, guest)
        except HandshakeRejected as error:
            self._refused(guest.address, str(error))
            with contextlib.suppress(OSError):
                guest.socket.sendall(error.farewell)
        except WireError:
            pass
        finally:
            self._end(guest)

    def _greet(self, guest: _Guest) -> Channel:
        """Return the connection after its handshake; HandshakeRejected, WireError."""
        with self._lock:
            credentials = self._credentials
        if credentials is None:
            raise HandshakeRejected("came before this node had joined")
        deadline = Deadline(handshake.SECONDS)
        try:
            wire.tune(guest.socket)
            guest.socket.settimeout(handshake.SECONDS)
            encrypted, binding = serve_encrypted(guest.socket, credentials)
            with self._lock:
                guest.socket = encrypted
            encrypted.settimeout(max(0.001, deadline.patience(handshake.SECONDS) or 0.0))
            agree(encrypted)
        except (OSError, ValueError) as error:
            if credentials.certificate:
                raise HandshakeRejected(f"did not agree on encryption: {error}") from error
            raise WireError(str(error)) from error
        return answer(guest.socket, credentials, PortRole.TILES, binding=binding, deadline=deadline)

    def _answer_all(self, channel: Channel, guest: _Guest) -> None:
        while True:
            # Between requests a peer may take as long as it likes, while it is alive.
            request = channel.receive(idle=True)
            try:
                self._answer(channel, request)
            except Denied as error:
                self._refused(guest.address, f"{channel.peer.id}: {error}")
                channel.send({"denied": str(error)})
            except NoRoom as error:
                self._refused(guest.address, f"{channel.peer.id}: {error}")
                channel.send({"error": str(error)})
            except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
                channel.send({"error": f"not a request: {error!r}"[:1000]})
                return

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        match request["op"]:
            case "inventory":
                self._inventory(channel)
            case "fetch":
                self._fetch(channel, request["ranges"])
            case "replicate":
                self._receive(channel, request)
            case other:
                raise ValueError(other)

    def _inventory(self, channel: Channel) -> None:
        offered = self._memory.offered()
        channel.send(
            {
                "tables": {one.table.identity: tables.to_wire(one.table) for one in offered},
                "snapshots": [
                    {
                        "generation": one.mark.generation,
                        "step": one.mark.step,
                        "rank": one.rank,
                        "world": one.world,
                        "facts": one.facts,
                        "table": one.table.identity,
                        "digests": "".join(one.digests),
                    }
                    for one in offered
                ],
            }
        )

    def _fetch(self, channel: Channel, ranges: list[list[int]]) -> None:
        tiles: list[memoryview | None] = []
        snapshots: dict[tuple[int, int, int], Stored | None] = {}
        for generation, step, rank, offset, nbytes in ranges:
            name = (generation, step, rank)
            if name not in snapshots:
                snapshots[name] = self._memory.find(*name)
            stored = snapshots[name]
            inside = stored is not None and 0 <= offset <= offset + nbytes <= len(stored.data)
            tiles.append(stored.data[offset : offset + nbytes] if stored is not None and inside else None)
        channel.send({"sizes": [-1 if data is None else len(data) for data in tiles]})
        _send_many(channel, [data for data in tiles if data])

    def _receive(self, channel: Channel, request: dict[str, Any]) -> None:
        mark, rank = Mark(int(request["generation"]), int(request["step"])), int(request["rank"])
        with self._lock:
            permit, why = self._permits.ask(Origin(generation=mark.generation, rank=rank), channel.peer.id)
        if permit is OfferVerdict.DENIED:
            raise Denied(f"offers what is not its own: {why}")
        if permit is OfferVerdict.UNKNOWN:
            channel.send({"error": why})
            return
        identity = str(request["identity"])
        if request["table"] is not None:
            table = tables.from_wire(request["table"])
            if table.identity != identity:
                raise ValueError("the table is not the one named")
            self._memory.learn(table)
        try:
            arriving = self._memory.arriving(
                mark,
                rank=rank,
                world=int(request["world"]),
                facts=dict(request["facts"]),
                table=identity,
                keep=[int(step) for step in request["keep"]],
                base=None if request["base"] is None else Mark(*(int(number) for number in request["base"])),
            )
        except tables.UnknownTable:
            channel.send({"table": True})
            return
        if arriving is None:
            channel.send({"stale": True})
            return
        good = False
        try:
            channel.send({"ok": True})
            good = _receive_snapshot(channel, arriving)
        finally:
            if not good:
                self._memory.lost(arriving)
        if not good:
            channel.send({"error": ALTERED})
        elif self._memory.arrived(arriving):
            channel.send({"held": True})
        else:
            channel.send({"stale": True})


def _receive_snapshot(channel: Channel, arriving: Arriving) -> bool:
    """Fill a snapshot and verify it; return whether every tile was good. All tiles are read in any case."""
    stored, good = arriving.stored, True
    for first, stop in stored.table.runs:
        sent = channel.receive_sealed((stop - first) * _DIGEST_BYTES).hex()
        low, high = stored.span(first, stop)
        channel.receive_into(stored.data[low:high])
        computed = memory.digests(stored.table, stored.data, first, stop)
        stored.digests[first:stop] = computed
        good = good and "".join(computed) == sent
    return good


def _send_many(channel: Channel, views: list[memoryview]) -> None:
    """Send many views, joining neighbours in memory and small ones."""
    batch: list[memoryview] = []
    size = 0
    for view in views:
        if len(view) >= 1 << 16:
            if batch:
                channel.send_bytes(b"".join(batch))
                batch, size = [], 0
            channel.send_bytes(view)
            continue
        batch.append(view)
        size += len(view)
        if size >= 1 << 20:
            channel.send_bytes(b"".join(batch))
            batch, size = [], 0
    if batch:
        channel.send_bytes(b"".join(batch))


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect a peer that vanished between requests."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
