"""The keys over which the agents of one generation agree: a table on one node, one TCP connection for each guest.

Not torch's TCPStore. Each client of that one looks up the server's name in DNS to have it for log lines, which takes
5 s wherever a resolver gives no answer (pytorch#159007): 64 agents on one machine needed 10 s to meet. Some of its
calls have no timeout, and waiting for a key that may never come means polling. Here the server answers a wait when all
its keys are there, and the guest can stop waiting at any time.

A message is four bytes of length and JSON: `["set", key, value]`, `["add", key, amount, token]`, `["get", [key, ...]]`;
an answer likewise. Values are bytes, one character each. A guest asks one thing at a time; one whose connection breaks
connects again and asks again, and the token keeps an amount from being added twice.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock

POLL = 0.1
"""Most seconds between two looks at whether the generation is over."""

CONNECT = 2.0
"""Seconds for one try to reach the table."""

LONGEST = 64 * 2**20
"""Bytes of the longest message; who announces more does not speak this language."""

_UNACKNOWLEDGED_MS = 10_000


class GenerationOver(Exception):
    """The generation ended while its agents were still meeting: wait for the next one."""


@dataclass(slots=True, eq=False)
class _Guest:
    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class Table:
    """Serves any number of generations from a thread of its own, until closed or the process ends."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), family=_family(address), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, str] = {}
        self._added: dict[str, tuple[str, int]] = {}
        self._over = ("", 0)
        self._parked: dict[str, list[tuple[_Guest, list[str], int]]] = {}
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread = threads.start(self._serve, name="elastic3d-table", edge=threads.Edge.AGAIN)

    def forget(self, root: str, before: int) -> None:
        """Have what lies under `root` for generations before this one deleted: nobody asks for it any more.

        Keys are root, the generation's `key`, a slash, and a name.
        """
        self._over = (root, before)
        if self._thread.is_alive():
            self._wake_in.send(b"f")

    def close(self) -> None:
        """Stop serving; guests wait until their generation is over. Idempotent."""
        if self._thread.is_alive():
            self._wake_in.send(b"c")
            self._thread.join(timeout=5)

    def _serve(self) -> None:
        while True:
            for key, mask in self._selector.select():
                if key.fileobj is self._wake_out:
                    if b"c" in self._wake_out.recv(64):
                        self._end()
                        return
                    self._forget(*self._over)
                    continue
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                guest: _Guest = key.data
                try:
                    if mask & selectors.EVENT_WRITE:
                        self._flush(guest)
                    if mask & selectors.EVENT_READ:
                        self._hear(guest)
                except (OSError, ValueError):
                    # It is gone, or it is none of ours.
                    self._drop(guest)

    def _forget(self, root: str, before: int) -> None:
        def old(key: str) -> bool:
            number = key[len(root) :].partition(".")[0] if key.startswith(root) else ""
            return number.isdecimal() and int(number) < before

        self._values = {key: value for key, value in self._values.items() if not old(key)}
        self._added = {token: added for token, added in self._added.items() if not old(added[0])}
        for key in [key for key in self._parked if old(key)]:
            for guest, _, _ in self._parked.pop(key):
                self._drop(guest)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._wake_in.close()
        self._selector.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, _Guest(connection))

    def _drop(self, guest: _Guest) -> None:
        if guest.socket.fileno() >= 0:
            self._selector.unregister(guest.socket)
            guest.socket.close()

    def _hear(self, guest: _Guest) -> None:
        data = guest.socket.recv(65536)
        if not data:
            raise ConnectionResetError
        guest.inbox += data
        while (message := _unpack(guest.inbox)) is not None:
            self._answer(guest, json.loads(message))

    def _answer(self, guest: _Guest, request: Any) -> None:
        match request:
            case ["set", str(key), str(value)]:
                self._put(key, value)
                self._reply(guest, True)
            case ["add", str(key), int(amount), str(token)]:
                if token not in self._added:
                    self._added[token] = (key, int(self._values.get(key, "0")) + amount)
                    self._put(key, str(self._added[token][1]))
                self._reply(guest, self._added[token][1])
            case ["get", [*keys]] if all(isinstance(key, str) for key in keys):
                self._seat(guest, keys, 0)
            case _:
                raise ValueError("not a request")

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        for guest, keys, index in self._parked.pop(key, ()):
            if guest.socket.fileno() >= 0:
                try:
                    self._seat(guest, keys, index)
                except OSError:
                    self._drop(guest)

    def _seat(self, guest: _Guest, keys: list[str], index: int) -> None:
        """Answer a get whose keys before `index` are there, or park it at the first that is not."""
        while index < len(keys) and keys[index] in self._values:
            index += 1
        if index < len(keys):
            self._parked.setdefault(keys[index], []).append((guest, keys, index))
        else:
            self._reply(guest, [self._values[key] for key in keys])

    def _reply(self, guest: _Guest, answer: Any) -> None:
        guest.outbox += _pack(answer)
        self._flush(guest)

    def _flush(self, guest: _Guest) -> None:
        try:
            del guest.outbox[: guest.socket.send(guest.outbox)]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.outbox else 0)
        self._selector.modify(guest.socket, events, guest)


class Seat:
    """One agent's place at the table of a generation: its keys lie under `prefix`.

    Every call blocks until it is answered; GenerationOver once the generation is `over`. Thread-safe, one call after
    the other.
    """

    def __init__(self, address: str, port: int, prefix: str, over: Callable[[], bool], clock: Clock = SYSTEM) -> None:
        self._where, self._prefix, self._over, self._clock = (address, port), prefix, over, clock
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Write one key."""
        self._ask(["set", self._prefix + key, value.decode("latin-1")])

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._ask(["add", self._prefix + key, amount, secrets.token_hex(8)]))

    def get(self, keys: list[str]) -> list[bytes]:
        """Return the values of the keys, once all are there."""
        return [value.encode("latin-1") for value in self._ask(["get", [self._prefix + key for key in keys]])]

    def close(self) -> None:
        """Leave the table. The next call comes back to it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, request: Any) -> Any:
        with self._lock:
            while not self._over():
                try:
                    return self._try(_pack(request))
                except (OSError, ValueError):
                    # Its host is dead or slow, the network forgot the connection, or another program has the port by
                    # now. The membership knows which.
                    self._clock.sleep(POLL)
        raise GenerationOver

    def _try(self, message: bytes) -> Any:
        answered = False
        try:
            connection = self._connection()
            connection.settimeout(CONNECT)
            connection.sendall(message)
            connection.settimeout(POLL)
            inbox = bytearray()
            while (answer := _unpack(inbox)) is None:
                inbox += self._receive(connection)
            answered = True
            return json.loads(answer)
        finally:
            # Whatever ends this early, be it a signal's handler: an answer that comes later must not be another's.
            if not answered:
                self.close()

    def _connection(self) -> socket.socket:
        if self._socket is None:
            # Not create_connection: the resolver's Python side costs milliseconds, even for an address.
            self._socket = socket.socket(_family(self._where[0]))
            self._socket.settimeout(CONNECT)
            self._socket.connect(self._where)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        return self._socket

    def _receive(self, connection: socket.socket) -> bytes:
        while not self._over():
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise ConnectionResetError
            return data
        raise GenerationOver


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _pack(value: Any) -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def _unpack(inbox: bytearray) -> bytes | None:
    """Take one whole message out of `inbox`, None while it is not there; ValueError for an impossible length."""
    if len(inbox) < 4:
        return None
    end = 4 + int.from_bytes(inbox[:4], "big")
    if end > LONGEST:
        raise ValueError(f"a message of {end} bytes")
    if len(inbox) < end:
        return None
    message = bytes(inbox[4:end])
    del inbox[:end]
    return message
