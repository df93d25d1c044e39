"""A slot's snapshots lent to the processes of its node: the memory that they lie in, instead of a copy over TCP.

A borrower names snapshots, and gets a descriptor for each that is here, over a Unix socket. Nothing that was lent is
overwritten until its connection ends, and whatever ends the borrower ends that. Its bytes are unverified, like those
of any source: the borrower knows their digests from elsewhere.

    {"borrow": [[generation, step, rank], ...]}    -> {"lent": [bytes of the snapshot or -1, ...]},
                                                      then the descriptors of those that are there, in this order
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence

from checkpointing.errors import SourceError, TileLost
from checkpointing.reading.sources import Offered
from elastic3d import threads
from elastic3d.clock import SYSTEM
from elastic3d.snapshots.arena import Arena
from elastic3d.snapshots.memory import SnapshotMemory, SnapshotName
from elastic3d.trust import local
from elastic3d.trust.listening import Listener, Refusal, Refusals

ANSWER_SECONDS = 5.0
"""Seconds after which a lender that does not answer is left alone: its tile server has the same."""

MOST_LENT = 64
"""Snapshots lent to one borrower: descriptors that fit into one message of the kernel's, with room to spare."""


class Lender:
    """Lends what is in `memory` to processes of this user, under an abstract `name` that nobody can guess.

    returned: called when something was given back, so that a buffer may be free. refused: called with each refused
    connection. Both are called on the lender's threads, and must not block.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        *,
        returned: Callable[[], None] = lambda: None,
        refused: Callable[[Refusal], None] = lambda refusal: None,
        name: str = "lender",
    ) -> None:
        self._memory, self._returned = memory, returned
        self.name: str = f"elastic3d-{os.urandom(16).hex()}"
        self._refused = Refusals(name, refused)
        self._listener = Listener(local.listen(self.name), self._refused)
        self._closed = False
        threads.start(self._accept, name=name)

    def close(self) -> None:
        """Lend nothing more. What was lent stays with its borrowers."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def _accept(self) -> None:
        while not self._closed and (accepted := self._listener.accept()) is not None:
            if isinstance(accepted, float):
                SYSTEM.sleep(accepted)
                continue
            connection = accepted[0]
            user = local.user_of(connection)
            if user != os.geteuid():
                self._refused(f"user {user}", "is not the user that runs this job")
                connection.close()
                continue
            try:
                threads.start(self._serve, connection, name="lender-borrower", edge=threads.Edge.ALONE)
            except RuntimeError as error:
                self._refused("a trainer of this node", f"{error}: it is served once there are threads again")
                connection.close()
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(ANSWER_SECONDS)
            frame = local.receive(connection)
            if frame is None:
                return
            try:
                wanted = [SnapshotName(*map(int, name)) for name in frame["borrow"]][:MOST_LENT]
            except (KeyError, TypeError, ValueError):
                return
            try:
                with self._memory.lent(wanted) as lent:
                    local.send(connection, {"lent": [-1 if one is None else one.nbytes for one in lent]})
                    descriptors = [one.descriptor for one in lent if one is not None]
                    if descriptors:
                        socket.send_fds(connection, [b"\0"], descriptors)
                    connection.settimeout(None)
                    connection.recv(1)
            finally:
                self._returned()


class BorrowedMemory:
    """Tiles of snapshots in this node's own memory, as a source for the resolver. Safe for several threads.

    Each tile is copied to its place and verified there. One that turns out damaged is mended with good bytes from
    elsewhere, for whoever reads it next.
    """

    def __init__(self, server: str, connection: socket.socket, lent: dict[SnapshotName, memoryview]) -> None:
        self.name = server
        self._connection, self._lent = connection, lent

    def fetch(self, tile: Offered) -> memoryview:
        """Return the tile's bytes where they lie, unverified; TileLost if that snapshot was not lent."""
        generation, step, rank, offset, nbytes = tile.where
        data = self._lent.get(SnapshotName(generation, step, rank))
        if data is None or not 0 <= offset <= offset + nbytes <= len(data):
            raise TileLost(f"step {step} of rank {rank} is no longer in the memory of {self.name}")
        return data[offset : offset + nbytes]

    def fill(self, wanted: Sequence[tuple[Offered, memoryview]]) -> Iterator[tuple[int, SourceError | None]]:
        """Copy each tile into its buffer, while other threads run."""
        for index, (tile, buffer) in enumerate(wanted):
            try:
                data = self.fetch(tile)
            except SourceError as error:
                yield index, error
                continue
            if len(data) == buffer.nbytes:
                _copy(data, buffer)
                yield index, None
            else:
                yield index, TileLost(f"{self.name} has {len(data)} bytes of a tile of {buffer.nbytes}")

    def repair(self, tile: Offered, data: bytes | bytearray | memoryview) -> None:
        """Write good bytes over those that were found damaged."""
        self.fetch(tile)[:] = data

    def close(self) -> None:
        """Give all of it back."""
        self._lent.clear()
        self._connection.close()


def borrow(server: str, lender: str, wanted: Sequence[SnapshotName]) -> BorrowedMemory:
    """Return the memory of the wanted snapshots that the lender of a tile server holds, until it is closed; OSError.

    Those it does not hold are left out.
    """
    wanted = wanted[:MOST_LENT]
    connection = local.connect(lender, ANSWER_SECONDS)
    try:
        local.send(connection, {"borrow": [list(name) for name in wanted]})
        answer = local.receive(connection)
        if answer is None:
            raise ConnectionError(f"the lender of {server} ended the connection")
        sizes = [int(size) for size in answer["lent"]]
        present = [(name, size) for name, size in zip(wanted, sizes, strict=True) if size >= 0]
        lent = dict(zip((name for name, _ in present), _map(connection, [size for _, size in present]), strict=True))
    except (KeyError, TypeError, ValueError) as error:
        connection.close()
        raise ConnectionError(f"the lender of {server} did not answer as one: {error!r}") from error
    except BaseException:
        connection.close()
        raise
    return BorrowedMemory(server, connection, lent)


def _map(connection: socket.socket, sizes: Sequence[int]) -> list[memoryview]:
    """Receive a descriptor for each size, and map as many bytes of it; ValueError, OSError."""
    if not sizes:
        return []
    _, descriptors, _, _ = socket.recv_fds(connection, 1, len(sizes), socket.MSG_CMSG_CLOEXEC)
    arenas = [Arena(descriptor) for descriptor in descriptors]
    try:
        return [arena.view(size) for arena, size in zip(arenas, sizes, strict=True)]
    finally:
        for arena in arenas:
            arena.close()  # the mapping stays with its view


def _copy(data: memoryview, buffer: memoryview) -> None:
    if data:
        target = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
