"""The two ends of one heartbeat connection: who is there, and its beats. They know nothing of who ought to be heard.

It opens with the handshake of the run (`trust/handshake.py`): the one that dials says who it is and whom it means, the
other answers with who it is, and each proves that it is of the run. After that both send a beat from time to time: a
seal of its place in the sequence, which nobody else can make, and which counts once.
"""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass, field
from enum import Enum

from elastic3d.membership.actions import Peer
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.frames import Forged, Seals
from elastic3d.trust.handshake import LIMIT, Answering, Dialling, Keys, Rejected, Role

STANDING = select.EPOLLRDHUP
"""What a connection that stands wakes its reader for: its end. Beats are read when it is time to send one."""

BEAT_BYTES = 8


class Told(Enum):
    """What reading a connection brought."""

    NOTHING = "nothing"
    HEARD = "heard"
    ENDED = "ended"
    REFUSED = "refused"


class Beats:
    """The beats of one connection, both directions."""

    def __init__(self, keys: Keys, rest: bytes) -> None:
        self._ours, self._theirs = Seals(keys.send, BEAT_BYTES), Seals(keys.receive, BEAT_BYTES)
        self._unsent, self._unread = b"", rest

    def send(self, connection: socket.socket) -> bool:
        """Send a beat, or what is left of the last one; return False where the connection ended.

        Where its buffer is full there is no beat: the other side reads none, and misses nothing.
        """
        try:
            if not self._unsent:
                self._unsent = self._ours.next(b"")
            self._unsent = self._unsent[connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def take(self, data: bytes) -> bool:
        """Take in what arrived; return whether there was a beat in it. Forged."""
        self._unread += data
        heard = False
        while len(self._unread) >= BEAT_BYTES:
            self._theirs.check(b"", self._unread[:BEAT_BYTES])
            self._unread, heard = self._unread[BEAT_BYTES:], True
        return heard


@dataclass(slots=True, eq=False)
class Dial:
    """The connection to one peer, or the try to make one. `known`: it proved to be the one we mean, and beats.

    refusal: how it was refused. distrust: why what answers there was not believed, "" where nothing was wrong.
    moved_at: when it was heard last, or begun.
    """

    peer: Peer
    socket: socket.socket | None = None
    connected: bool = False
    refusal: str = ""
    distrust: str = ""
    moved_at: float = 0.0
    retry_at: float = 0.0
    opening: Dialling | None = field(default=None, repr=False)
    beats: Beats | None = field(default=None, repr=False)

    @property
    def known(self) -> bool:
        """Whether it has proved itself."""
        return self.beats is not None

    @property
    def mask(self) -> int:
        """What it wakes its reader for."""
        if self.known:
            return STANDING
        return select.EPOLLIN if self.connected else select.EPOLLIN | select.EPOLLOUT

    def open(self, credentials: Credentials, now: float) -> Told:
        """Begin anew."""
        self.close()
        try:
            self.socket = socket.socket(family(self.peer.address), socket.SOCK_STREAM)
        except OSError:
            return Told.ENDED
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.distrust, self.moved_at = "", now
        try:
            self.opening = Dialling(credentials, Role.LINK, meant=self.peer.id)
            code = self.socket.connect_ex((self.peer.address, self.peer.port))
        except (OSError, OverflowError, TypeError, ValueError):
            # A record with an address that is none: this peer is heard by nobody, the others are.
            code = errno.EADDRNOTAVAIL
        return Told.NOTHING if code in (0, errno.EINPROGRESS) else self._failed(code)

    def read(self, now: float) -> Told:
        """Take the connection's news: it stands, it answers, it beats, or it ended."""
        if self.socket is None:
            return Told.NOTHING
        if not self.connected:
            code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self._failed(code)
            self.connected = True
            assert self.opening is not None
            return Told.NOTHING if send(self.socket, self.opening.hello) else Told.ENDED
        data = receive(self.socket)
        if not data:
            return Told.NOTHING if data is None else Told.ENDED
        try:
            if self.beats is None:
                return self._answered(data, now)
            if not self.beats.take(data):
                return Told.NOTHING
        except Forged as error:
            self.distrust = str(error)
            return Told.ENDED
        self.moved_at = now
        return Told.HEARD

    def _answered(self, data: bytes, now: float) -> Told:
        assert self.socket is not None
        assert self.opening is not None
        try:
            proof = self.opening.feed(data)
        except Rejected as error:
            if error.foreign:
                return self._refused(f"answers, but {error}; another program than {self.peer.id}'s")
            # Whoever it is, it may only be somebody in between, or of an etcd that was emptied: no death.
            self.distrust = f"answers for {self.peer.id}, but {error}"
            return Told.ENDED
        found = self.opening.peer
        if found is None:
            return Told.NOTHING
        if found.id != self.peer.id:
            return self._refused(f"answers as {found.id[:100]!r}, not as {self.peer.id}")
        if not send(self.socket, proof):
            return Told.ENDED
        self.beats = Beats(found.keys, found.rest)
        self.moved_at = now
        return Told.HEARD

    def beat(self) -> bool:
        """Send a beat, once known; return False where the connection ended."""
        return self.beats is None or self.socket is None or self.beats.send(self.socket)

    def close(self) -> None:
        """End the connection."""
        if self.socket is not None:
            self.socket.close()
        self.socket, self.connected, self.opening, self.beats = None, False, None, None

    def _failed(self, code: int) -> Told:
        return self._refused("refuses the heartbeat connection") if code == errno.ECONNREFUSED else Told.ENDED

    def _refused(self, how: str) -> Told:
        self.refusal = f"{self.peer.address}:{self.peer.port} {how}"
        return Told.REFUSED


@dataclass(slots=True, eq=False)
class Guest:
    """Somebody who dialled us from `address`. `known`: it has proved to be of the run, and beats.

    id: who it is, if it means us. distrust: why it was not believed, "" where nothing was wrong.
    """

    socket: socket.socket
    address: str
    moved_at: float
    me: str
    opening: Answering = field(repr=False)
    id: str = ""
    distrust: str = ""
    beats: Beats | None = field(default=None, repr=False)

    @property
    def known(self) -> bool:
        """Whether it has proved itself."""
        return self.beats is not None

    @property
    def mask(self) -> int:
        """What it wakes its reader for."""
        return STANDING if self.known else select.EPOLLIN

    def read(self, now: float) -> Told:
        """Take a step of its proof, and answer it, or beats."""
        data = receive(self.socket)
        if data is None:
            return Told.NOTHING
        if not data:
            if not self.known and not self.opening.untouched:
                self.distrust = "went away before it had proved itself"
            return Told.ENDED
        try:
            if self.beats is None:
                return self._greeted(data, now)
            if not self.beats.take(data):
                return Told.NOTHING
        except (Rejected, Forged) as error:
            self.distrust = str(error)
            return Told.ENDED
        self.moved_at = now
        return Told.HEARD

    def _greeted(self, data: bytes, now: float) -> Told:
        reply = self.opening.feed(data)
        if reply and not send(self.socket, reply):
            return Told.ENDED
        found = self.opening.peer
        if found is None:
            return Told.NOTHING
        self.beats = Beats(found.keys, found.rest)
        if found.meant == self.me:
            self.id = found.id
        self.moved_at = now
        return Told.HEARD

    def beat(self) -> bool:
        """Send a beat, once known; return False where the connection ended."""
        return self.beats is None or self.beats.send(self.socket)

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


def send(connection: socket.socket, data: bytes) -> bool:
    """Return whether the connection may still stand; a handshake always fits into its buffer."""
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
        return connection.recv(LIMIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def family(address: str) -> socket.AddressFamily:
    """Return what kind of address it is."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
