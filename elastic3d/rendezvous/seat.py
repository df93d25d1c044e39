"""A guest at the table of a generation (`table.py`): makes one request at a time while the generation lasts."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UsageError
from elastic3d.rendezvous.table import SHAPE
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import dial_encrypted
from elastic3d.trust.frames import Forged, Frames
from elastic3d.trust.handshake import Dialling, HandshakeRejected, Peer, PortRole
from elastic3d.trust.listening import Refusal, Refusals, family

POLL = 0.1
"""Most seconds between two checks whether the generation is over."""

CONNECT = 2.0
"""Seconds for one try to reach the table."""

_UNACKNOWLEDGED_MS = 10_000


class GenerationOver(Exception):
    """The generation ended while its agents were still meeting: wait for the next one."""


class WaitedTooLong(Exception):
    """There was no answer when the caller's time was over."""


class Seat:
    """One agent's place at the table of a generation, whose keys lie under `prefix`.

    credentials: returns the run's at present. refused: called if the one that answers at the port is not of the run.

    Every call blocks until it is answered; GenerationOver once the generation is `over`, WaitedTooLong at the monotonic
    time `until`, None for no limit. Thread-safe, one call after the other.
    """

    def __init__(
        self,
        address: str,
        port: int,
        prefix: str,
        over: Callable[[], bool],
        credentials: Callable[[], Credentials],
        *,
        refused: Callable[[Refusal], None] = lambda refusal: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._where, self._prefix, self._over, self._clock = (address, port), prefix, over, clock
        self._credentials = credentials
        self._refused = Refusals("table", refused, clock=clock)
        self._socket: socket.socket | None = None
        self._frames: Frames | None = None
        self._lock = threading.Lock()
        self._until: float | None = None

    def set(self, key: str, value: bytes, until: float | None = None) -> None:
        """Write one key."""
        self._ask(["set", self._prefix + key, _text(value)], until)

    def get(self, keys: list[str], until: float | None = None) -> list[bytes]:
        """Return the values of the keys, once all are there."""
        values = self._ask(["get", [self._prefix + key for key in keys]], until)
        return [_bytes(value) for value in values]

    def check(self, keys: list[str], until: float | None = None) -> bool:
        """Return whether all keys are there."""
        return bool(self._ask(["check", [self._prefix + key for key in keys]], until))

    def count(self, until: float | None = None) -> int:
        """Return how many keys the generation has."""
        return int(self._ask(["count", self._prefix], until))

    def add(self, key: str, amount: int, until: float | None = None) -> int:
        """Add to a counter and return it; UsageError if the key holds something else."""
        total = self._change("add", key, amount, until=until)
        if total is None:
            raise UsageError(f"store.add({key!r}, {amount}): the value under this key is not a number")
        return int(total)

    def append(self, key: str, value: bytes, until: float | None = None) -> None:
        """Append to the value that is there."""
        self._change("append", key, _text(value), until=until)

    def swap(self, key: str, expected: bytes, value: bytes, until: float | None = None) -> bytes:
        """Replace a value if it is `expected`, b"" for none; return what is there then, `expected` if nothing is."""
        return _bytes(self._change("swap", key, _text(expected), _text(value), until=until))

    def delete(self, key: str, until: float | None = None) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._change("delete", key, until=until))

    def close(self) -> None:
        """Leave the table. The next call comes back to it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = self._frames = None

    def _change(self, what: str, key: str, *rest: Any, until: float | None) -> Any:
        return self._ask([what, self._prefix + key, *rest, secrets.token_hex(8)], until)

    def _ask(self, request: Any, until: float | None = None) -> Any:
        with self._lock:
            self._until = until
            while self._lasts():
                try:
                    return self._try(request)
                except (HandshakeRejected, Forged) as error:
                    self._refused(f"{self._where[0]}:{self._where[1]}", str(error))
                    self._clock.sleep(POLL)
                except (OSError, ValueError, RecursionError):
                    # Its host is dead or slow, the network lost the connection, or another program has the port now.
                    # The membership knows which.
                    self._clock.sleep(POLL)
        raise GenerationOver

    def _lasts(self) -> bool:
        """Return whether the generation lasts; WaitedTooLong when the present call's time is over."""
        if self._over():
            return False
        if self._until is not None and self._clock.monotonic() >= self._until:
            raise WaitedTooLong
        return True

    def _try(self, request: Any) -> Any:
        answered = False
        try:
            connection, frames = self._connection()
            connection.settimeout(CONNECT)
            connection.sendall(frames.pack_json(request))
            connection.settimeout(POLL)
            while (body := frames.next()) is None:
                frames.take(self._receive(connection))
            answer = json.loads(body)
            answered = True
            return answer
        finally:
            # Whatever ends this early, even a signal handler: a late answer must not be taken for the next one's.
            if not answered:
                self.close()

    def _connection(self) -> tuple[socket.socket, Frames]:
        if self._socket is None or self._frames is None:
            # Not create_connection: the resolver's Python side costs milliseconds, even for an address.
            self._socket = socket.socket(family(self._where[0]))
            self._socket.settimeout(CONNECT)
            self._socket.connect(self._where)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            credentials = self._credentials()
            self._socket, binding = dial_encrypted(self._socket, credentials)
            peer = self._prove(self._socket, credentials, binding)
            self._frames = Frames(SHAPE, peer.keys, peer.rest)
        return self._socket, self._frames

    def _prove(self, connection: socket.socket, credentials: Credentials, binding: bytes) -> Peer:
        ours = Dialling(credentials, PortRole.TABLE, binding=binding)
        connection.sendall(ours.hello)
        connection.settimeout(POLL)
        while ours.peer is None:
            proof = ours.feed(self._receive(connection))
            if proof:
                connection.settimeout(CONNECT)
                connection.sendall(proof)
        return ours.peer

    def _receive(self, connection: socket.socket) -> bytes:
        while self._lasts():
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionResetError
            return data
        raise GenerationOver


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
