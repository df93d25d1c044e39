"""The keys over which the agents of one generation agree: a table on one node, one TCP connection for each guest.

Not torch's TCPStore. Each client of that looks up the server's name in DNS for its log lines, which takes 5 s wherever
a resolver gives no answer (pytorch#159007): 64 agents on one machine needed 10 s to meet. Some of its calls have no
timeout, and waiting for a key that may never come means polling. Here the server answers a wait when all its keys are
there, and the guest can stop waiting at any time.

A connection opens with the handshake of the run (`trust/handshake.py`); then there are frames of JSON, as in
`trust/frames.py`. The requests, and what answers them:

    ["set", key, value]                      true
    ["get", [key, ...]]                      the values, once all are there
    ["check", [key, ...]]                    whether all are there
    ["count", prefix]                        how many keys begin with it
    ["add", key, amount, token]              the sum; null if the value is not a number
    ["append", key, value, token]            true
    ["swap", key, expected, value, token]    what is there now; `expected` if nothing is; "" means nothing
    ["delete", key, token]                   whether it was there

Values are bytes, one character each. A guest makes one request at a time; if its connection breaks it connects again
and repeats the request, and the token keeps that from being done twice. If the nodes have certificates, all of it is
encrypted.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.trust import handshake
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import load
from elastic3d.trust.frames import Forged, Frames, FrameShape
from elastic3d.trust.handshake import LIMIT, Answering, HandshakeRejected, PortRole
from elastic3d.trust.listening import ACCEPTED_AT_ONCE, PAUSE, Listener, Refusal, Refusals, Waiting, family, most_known
from elastic3d.trust.stream import Stream

SHAPE = FrameShape(most=64 << 20)
"""Of all messages; who announces more does not speak this language."""

MOST_ANSWERS = 100_000
"""Most answers that are remembered, in case they are asked for again: only the last one of each guest can be."""


@dataclass(slots=True, eq=False)
class _Guest:
    """A caller: `frames` once it has proved that it is of the run, `late_at` when that is too late."""

    stream: Stream
    address: str
    opening: Answering
    late_at: float
    frames: Frames | None = None
    writing: bool = False

    @property
    def socket(self) -> socket.socket:
        """The connection."""
        return self.stream.socket


class KeyTableServer:
    """Serves any number of generations from its own thread, until it is closed or the process ends.

    credentials: of the run; callers without its secret are turned away, and all is encrypted with the certificate.
    refused: called with each caller turned away, on the table's thread. OSError, ValueError: the certificate cannot be
    used.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        refused: Callable[[Refusal], None] = lambda refusal: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._credentials, self._clock = credentials, clock
        # Once: its files may be on a disk that hangs, and nobody checks a certificate's age.
        self._encryption = load(credentials.certificate, credentials.key)
        self._refused = Refusals("table", refused, clock=clock)
        listening = socket.create_server((address, 0), family=family(address), backlog=4096)
        listening.setblocking(False)
        self._listener = Listener(listening, self._refused)
        self.port: int = self._listener.port
        self._guests = 0
        self._waiting: Waiting[_Guest] = Waiting()
        self._listen_at: float | None = None
        self._values: dict[str, str] = {}
        self._answers: dict[str, tuple[str, Any]] = {}
        self._over = ("", 0)
        self._parked: dict[str, list[tuple[_Guest, list[str], int]]] = {}
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener.socket, selectors.EVENT_READ, None)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)
        self._thread = threads.start(self._serve, name="elastic3d-table", edge=threads.Edge.AGAIN)

    def forget(self, root: str, before: int) -> None:
        """Delete the keys under `root` of generations before this one: nobody asks for them any more.

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

    def set_credentials(self, credentials: Credentials) -> None:
        """Ask callers for another secret from now on."""
        self._credentials = credentials

    def _serve(self) -> None:
        while True:
            for key, mask in self._selector.select(self._patience()):
                if key.fileobj is self._wake_out:
                    if b"c" in self._wake_out.recv(64):
                        self._end()
                        return
                    self._forget(*self._over)
                    continue
                if key.fileobj is self._listener.socket:
                    self._accept()
                    continue
                guest: _Guest = key.data
                if guest.socket.fileno() < 0:
                    continue  # ended by an earlier one of the batch
                try:
                    if mask & selectors.EVENT_WRITE:
                        self._flush(guest)
                    if mask & selectors.EVENT_READ:
                        self._hear(guest)
                except (HandshakeRejected, Forged) as error:
                    self._refused(guest.address, str(error))
                    self._drop(guest, error.farewell if isinstance(error, HandshakeRejected) else b"")
                except (OSError, ValueError, RecursionError):
                    # It is gone, or does not belong to the run.
                    self._drop(guest)
            self._look()

    def _patience(self) -> float | None:
        if not self._waiting and self._listen_at is None:
            return None
        return PAUSE

    def _look(self) -> None:
        """Do what is due even if nothing arrived."""
        now = self._clock.monotonic()
        for guest in self._waiting.all():
            if now >= guest.late_at:
                self._refused(guest.address, f"did not prove itself within {handshake.SECONDS:g} s")
                self._drop(guest)
        if self._listen_at is not None and now >= self._listen_at:
            self._listen_at = None
            self._selector.register(self._listener.socket, selectors.EVENT_READ, None)

    def _forget(self, root: str, before: int) -> None:
        def old(key: str) -> bool:
            number = key[len(root) :].partition(".")[0] if key.startswith(root) else ""
            return number.isdecimal() and int(number) < before

        self._values = {key: value for key, value in self._values.items() if not old(key)}
        self._answers = {token: answer for token, answer in self._answers.items() if not old(answer[0])}
        for key in [key for key in self._parked if old(key)]:
            for guest, _, _ in self._parked.pop(key):
                self._drop(guest)

    def _end(self) -> None:
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._wake_in.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            accepted = self._listener.accept()
            if accepted is None:
                return
            if isinstance(accepted, float):
                if accepted:
                    # Otherwise it would wake the thread for ever.
                    self._selector.unregister(self._listener.socket)
                    self._listen_at = self._clock.monotonic() + accepted
                return
            self._welcome(*accepted)

    def _welcome(self, connection: socket.socket, address: str) -> None:
        if self._guests - len(self._waiting) >= most_known():
            self._refused(address, "too many connections of this run's own stand already")
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        late_at = self._clock.monotonic() + handshake.SECONDS
        stream = Stream(connection, self._encryption, answers=True)
        opening = Answering(self._credentials, PortRole.TABLE, binding=stream.binding)
        guest = _Guest(stream, address, opening, late_at)
        self._selector.register(connection, selectors.EVENT_READ, guest)
        self._guests += 1
        crowded = self._waiting.add(guest, address)
        if crowded is not None:
            self._refused(crowded.address, "too many connections that have not proved themselves")
            self._drop(crowded)

    def _drop(self, guest: _Guest, farewell: bytes = b"") -> None:
        if guest.socket.fileno() >= 0:
            self._selector.unregister(guest.socket)
            guest.stream.hang_up(farewell)
            self._guests -= 1
            self._waiting.remove(guest)

    def _hear(self, guest: _Guest) -> None:
        data = guest.stream.receive(LIMIT if guest.frames is None else 65536)
        if data is None:
            self._flush(guest)
            return
        if not data:
            if guest.frames is None and not (guest.opening.untouched and guest.stream.untouched):
                raise HandshakeRejected("went away before it had proved itself")
            raise ConnectionResetError
        if guest.frames is None:
            self._send(guest, guest.opening.feed(data))
            if guest.opening.peer is None:
                return
            guest.stream.proved()
            guest.frames = Frames(SHAPE, guest.opening.peer.keys, guest.opening.peer.rest)
            self._waiting.remove(guest)
        else:
            guest.frames.take(data)
        while (message := guest.frames.next()) is not None:
            self._answer(guest, json.loads(message))

    def _answer(self, guest: _Guest, request: Any) -> None:
        match request:
            case ["set", str(key), str(value)]:
                self._put(key, value)
                self._reply(guest, True)
            case ["get", [*keys]] if all(isinstance(key, str) for key in keys):
                self._seat(guest, keys, 0)
            case ["check", [*keys]] if all(isinstance(key, str) for key in keys):
                self._reply(guest, all(key in self._values for key in keys))
            case ["count", str(prefix)]:
                self._reply(guest, sum(key.startswith(prefix) for key in self._values))
            case ["add" | "append" | "swap" | "delete", str(key), *_, str(token)]:
                if token not in self._answers:
                    self._answers[token] = (key, self._change(request[:-1]))
                    if len(self._answers) > MOST_ANSWERS:
                        del self._answers[next(iter(self._answers))]
                self._reply(guest, self._answers[token][1])
            case _:
                raise ValueError("not a request")

    def _change(self, request: list[Any]) -> Any:
        """Make a change that depends on the present value; return the answer."""
        match request:
            case ["add", key, int(amount)]:
                try:
                    total = int(self._values.get(key, "0")) + amount
                except ValueError:
                    return None
                self._put(key, str(total))
                return total
            case ["append", key, str(value)]:
                self._put(key, self._values.get(key, "") + value)
                return True
            case ["swap", key, str(expected), str(value)]:
                # As torch's TCPStore does it.
                if self._values.get(key, "" if not expected else None) == expected:
                    self._put(key, value)
                return self._values.get(key, expected)
            case ["delete", key]:
                return self._values.pop(key, None) is not None
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
        assert guest.frames is not None
        self._send(guest, guest.frames.pack_json(answer))

    def _send(self, guest: _Guest, data: bytes) -> None:
        if not guest.stream.send(data):
            raise ConnectionResetError
        self._watch(guest)

    def _flush(self, guest: _Guest) -> None:
        if not guest.stream.flush():
            raise ConnectionResetError
        self._watch(guest)

    def _watch(self, guest: _Guest) -> None:
        if guest.stream.unsent is not guest.writing:
            guest.writing = guest.stream.unsent
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.writing else 0)
            self._selector.modify(guest.socket, events, guest)
