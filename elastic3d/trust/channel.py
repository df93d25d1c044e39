"""A blocking connection, proved and then used frame by frame: for code that has a thread for it.

A frame is a length (4 bytes, big-endian), a body, and its seal (`frames`). Raw bytes may follow a frame that says so
and names their digests; the receiver checks these. Memory grows with the bytes that arrive, never with the length that
is announced.

Every frame has a deadline. Bytes that came in time count, however late this process reads them.
"""

from __future__ import annotations

import contextlib
import json
import socket
from types import TracebackType
from typing import Any, Self

from elastic3d.clock import SYSTEM
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.frames import Forged, Frames, FrameShape, FrameTooLong
from elastic3d.trust.handshake import LIMIT, SECONDS, Answering, Dialling, HandshakeRejected, Peer, PortRole

SILENCE_SECONDS = 5.0
"""Seconds without an expected byte after which the other side counts as gone."""

SLOWEST = 512 << 10
"""Fewest bytes per second of a frame or a run of raw bytes, after a first allowance of `SILENCE_SECONDS`."""

_SHAPE = FrameShape(most=1 << 30)
_FIRST_PART = 64 << 10
_SENT_AT_ONCE = 4 << 20


class WireError(Exception):
    """The other side is gone, silent, not of this run, or does not speak this protocol. Another source may help."""


class Deadline:
    """The moment so many seconds from now, None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else SYSTEM.monotonic() + seconds

    def patience(self, most: float | None) -> float | None:
        """Return the seconds to wait for the next bytes; 0.0 when time is up: only bytes that are there count then."""
        if self._end is None:
            return most
        left = max(0.0, self._end - SYSTEM.monotonic())
        return left if most is None else min(left, most)


class Channel:
    """Both directions of one connection. One thread at a time; `shutdown` may come from another."""

    def __init__(self, connection: socket.socket, peer: Peer) -> None:
        self.socket, self.peer = connection, peer
        self._ahead = memoryview(peer.rest)
        self._frames = Frames(_SHAPE, peer.keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self.socket.close()

    def shutdown(self) -> None:
        """Wake a thread that waits on this connection; its call fails."""
        shut(self.socket)

    def send(self, frame: dict[str, Any]) -> None:
        """Send a JSON object; WireError."""
        self.send_bytes(self._frames.pack_json(frame))

    def send_sealed(self, body: bytes) -> None:
        """Send bytes as a frame; WireError."""
        self.send_bytes(self._frames.pack(body))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw bytes that an earlier frame announced; WireError."""
        view = memoryview(data)
        try:
            self.socket.settimeout(SILENCE_SECONDS)
            # The timeout is for each part, not for the whole.
            for start in range(0, len(view), _SENT_AT_ONCE):
                self.socket.sendall(view[start : start + _SENT_AT_ONCE])
        except (OSError, ValueError) as error:
            raise WireError(str(error) or type(error).__name__) from error

    def receive(self, *, idle: bool = False) -> dict[str, Any]:
        """Return the next JSON object; WireError, also at end of file. idle: wait for its first byte without limit."""
        body = self.receive_sealed(idle=idle)
        try:
            frame = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError("the other side does not speak the tile protocol") from error
        if not isinstance(frame, dict):
            raise WireError("the other side does not speak the tile protocol")
        return frame

    def receive_sealed(self, limit: int = _SHAPE.most, *, idle: bool = False) -> bytes:
        """Return the body of the next frame, of at most `limit` bytes; WireError."""
        frames = self._frames
        if idle:
            self._take(1, Deadline(None), None)
        deadline = Deadline(SILENCE_SECONDS)
        while frames.announced is None:
            self._take(frames.wanted, deadline)
        size = frames.announced
        if size > limit:
            raise WireError(f"the other side announces a frame of {size} bytes; {limit} is the most")
        deadline, arrived = Deadline(SILENCE_SECONDS + size / SLOWEST), 0
        try:
            while (body := frames.next()) is None:
                part = min(frames.wanted, max(_FIRST_PART, arrived))
                self._take(part, deadline)
                arrived += part
        except (Forged, FrameTooLong) as error:
            raise WireError(str(error)) from error
        return body

    def _take(self, size: int, deadline: Deadline, most: float | None = SILENCE_SECONDS) -> None:
        part = bytearray(size)
        self._fill(memoryview(part), deadline, most)
        self._frames.take(part)

    def receive_bytes(self, size: int) -> bytearray:
        """Return exactly `size` raw bytes, a number that this side chose; WireError."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with raw bytes; WireError."""
        self._fill(target, Deadline(SILENCE_SECONDS + len(target) / SLOWEST))

    def _fill(self, target: memoryview, deadline: Deadline, most: float | None = SILENCE_SECONDS) -> None:
        at = min(len(self._ahead), len(target))
        target[:at], self._ahead = self._ahead[:at], self._ahead[at:]
        try:
            while at < len(target):
                self.socket.settimeout(deadline.patience(most))
                count = self.socket.recv_into(target[at:])
                if not count:
                    raise WireError("the other side has closed the connection")
                at += count
        except TimeoutError as error:
            raise WireError("the other side is silent") from error
        except BlockingIOError as error:
            raise WireError("the other side is too slow") from error
        except (OSError, ValueError) as error:
            raise WireError(str(error) or type(error).__name__) from error


def dial(
    connection: socket.socket,
    credentials: Credentials,
    role: PortRole,
    *,
    meant: str = "",
    generation: int = 0,
    binding: bytes = b"",
    seconds: float = SILENCE_SECONDS,
) -> Channel:
    """Prove to the other side that we are of the run, and have it prove that too; WireError leaves the socket open."""
    ours = Dialling(credentials, role, meant=meant, generation=generation, binding=binding)
    deadline = Deadline(seconds)
    try:
        connection.settimeout(seconds)
        connection.sendall(ours.hello)
        while ours.peer is None:
            proof = ours.feed(_arrived(connection, deadline))
            if proof:
                connection.sendall(proof)
    except HandshakeRejected as error:
        raise WireError(f"the other side {error}") from error
    except (OSError, ValueError) as error:
        raise WireError(str(error) or type(error).__name__) from error
    return Channel(connection, ours.peer)


def answer(
    connection: socket.socket,
    credentials: Credentials,
    role: PortRole,
    *,
    binding: bytes = b"",
    deadline: Deadline | None = None,
) -> Channel:
    """Have the caller prove that it is of the run; HandshakeRejected, or WireError for one that sent nothing.

    deadline: for the proof, `SECONDS` from now by default.
    """
    theirs = Answering(credentials, role, binding=binding)
    deadline = deadline or Deadline(SECONDS)
    try:
        while theirs.peer is None:
            reply = theirs.feed(_arrived(connection, deadline))
            if reply:
                connection.sendall(reply)
    except (TimeoutError, BlockingIOError) as error:
        raise HandshakeRejected(f"did not prove itself within {SECONDS:g} s") from error
    except (OSError, ValueError) as error:
        if theirs.untouched:
            raise WireError("gone before it said anything") from error
        raise HandshakeRejected("went away before it had proved itself") from error
    return Channel(connection, theirs.peer)


def _arrived(connection: socket.socket, deadline: Deadline) -> bytes:
    connection.settimeout(deadline.patience(None))
    data = connection.recv(LIMIT)
    if not data:
        raise ConnectionResetError("the other side has closed the connection")
    return data


def shut(connection: socket.socket) -> None:
    """Shut a socket down in both directions, whichever thread waits on it.

    An encrypted socket's own method would first turn it into a plain one, for everybody.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
