"""The two ends of one heartbeat connection: who is there, and its beats. They know nothing of who ought to be heard.

The one that dials says who it is and whom it means, as two words and an end of line; the other answers with who it is.
After that both send a byte from time to time. Ids are percent-encoded, so that each is one word.
"""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass
from enum import Enum
from urllib.parse import quote, unquote

from elastic3d.membership.actions import Peer

LONGEST_HELLO = 4096
"""Bytes. More than this before the end of the line is no hello of ours."""

STANDING = select.EPOLLRDHUP
"""What a connection that stands wakes its reader for: its end. Beats are read when it is time to send one."""


class Told(Enum):
    """What reading a connection brought."""

    NOTHING = "nothing"
    HEARD = "heard"
    ENDED = "ended"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Dial:
    """The connection to one peer, or the try to make one. `known`: it answered as the one we mean, and beats.

    refusal: how it was refused. moved_at: when it was heard last, or begun. unread: beats that lie in it.
    """

    peer: Peer
    socket: socket.socket | None = None
    connected: bool = False
    known: bool = False
    answer: bytes = b""
    refusal: str = ""
    unread: int = 0
    moved_at: float = 0.0
    retry_at: float = 0.0

    @property
    def mask(self) -> int:
        """What it wakes its reader for."""
        if self.known:
            return STANDING
        return select.EPOLLIN if self.connected else select.EPOLLIN | select.EPOLLOUT

    def open(self, now: float) -> Told:
        """Begin anew."""
        self.close()
        try:
            self.socket = socket.socket(family(self.peer.address), socket.SOCK_STREAM)
        except OSError:
            return Told.ENDED
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answer, self.unread, self.moved_at = b"", 0, now
        try:
            code = self.socket.connect_ex((self.peer.address, self.peer.port))
        except (OSError, OverflowError, TypeError, ValueError):
            # A record with an address that is none: this peer is heard by nobody, the others are.
            code = errno.EADDRNOTAVAIL
        return Told.NOTHING if code in (0, errno.EINPROGRESS) else self._failed(code)

    def read(self, me: str, now: float) -> Told:
        """Take the connection's news: it stands, it answers, it beats, or it ended."""
        if self.socket is None:
            return Told.NOTHING
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self._failed(code)
            self.connected = True
            hello = word(me) + b" " + word(self.peer.id) + b"\n"
            return Told.NOTHING if send(self.socket, hello) else Told.ENDED
        data = receive(self.socket)
        if not data:
            return Told.NOTHING if data is None else Told.ENDED
        if not self.known:
            self.answer += data
            line, end, _beats = self.answer.partition(b"\n")
            if not end and len(line) <= LONGEST_HELLO:
                return Told.NOTHING
            if not end or line != word(self.peer.id):
                other = unquote(line[:100].decode("ascii", "replace"))
                return self._refused(f"answers as {other!r}, not as {self.peer.id}")
            self.known = True
        self.moved_at, self.unread = now, 0
        return Told.HEARD

    def beat(self) -> bool:
        """Send a beat, once known; return False where the connection ended."""
        return not self.known or self.socket is None or send(self.socket, b".")

    def close(self) -> None:
        """End the connection."""
        if self.socket is not None:
            self.socket.close()
        self.socket, self.connected, self.known = None, False, False

    def _failed(self, code: int) -> Told:
        return self._refused("refuses the heartbeat connection") if code == errno.ECONNREFUSED else Told.ENDED

    def _refused(self, how: str) -> Told:
        self.refusal = f"{self.peer.address}:{self.peer.port} {how}"
        return Told.REFUSED


@dataclass(slots=True, eq=False)
class Guest:
    """Somebody who dialled us. `known`: its hello is answered, and it beats. `id`: who it is, if it means us."""

    socket: socket.socket
    moved_at: float
    known: bool = False
    unread: int = 0
    hello: bytes = b""
    id: str = ""

    @property
    def mask(self) -> int:
        """What it wakes its reader for."""
        return STANDING if self.known else select.EPOLLIN

    def read(self, me: str, now: float) -> Told:
        """Take a hello, and answer it, or beats."""
        data = receive(self.socket)
        if not data:
            return Told.NOTHING if data is None else Told.ENDED
        if not self.known:
            self.hello += data
            line, end, _beats = self.hello.partition(b"\n")
            if not end:
                return Told.NOTHING if len(line) <= LONGEST_HELLO else Told.ENDED
            who, _, meant = line.partition(b" ")
            if not who or not meant or not send(self.socket, word(me) + b"\n"):
                return Told.ENDED
            self.known = True
            if meant == word(me):
                self.id = unquote(who.decode("ascii", "replace"))
        self.moved_at, self.unread = now, 0
        return Told.HEARD

    def beat(self) -> bool:
        """Send a beat, once known; return False where the connection ended."""
        return not self.known or send(self.socket, b".")

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def word(id: str) -> bytes:
    """Return an id as one word."""
    return quote(id, errors="surrogatepass").encode()


def send(connection: socket.socket, data: bytes) -> bool:
    """Return whether the connection may still stand; what does not fit into its buffer is not missed."""
    try:
        connection.send(data)
    except BlockingIOError:
        pass
    except OSError:
        return False
    return True


def receive(connection: socket.socket) -> bytes | None:
    """Return what arrived, None for nothing, b"" at the connection's end."""
    try:
        return connection.recv(1024)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def family(address: str) -> socket.AddressFamily:
    """Return what kind of address it is."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
