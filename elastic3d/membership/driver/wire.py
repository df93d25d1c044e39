"""The two ends of one heartbeat connection: the peer's identity and its messages. Others decide which peers to hear.

It opens with the handshake of the run (`trust/handshake.py`): the end that dials says who it is and whom it means, the
other answers who it is, and each proves that it is of the run. After that both send messages: a beat from time to time,
and sometimes a question or an answer (`messages`). Where the node has a certificate, all of it is encrypted
(`trust/stream.py`).
"""

from __future__ import annotations

import errno
import select
import socket
from dataclasses import dataclass, field
from enum import Enum

from elastic3d.membership.actions import RingPeer
from elastic3d.membership.driver.messages import Garbled, Message, Messages
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import Encryption
from elastic3d.trust.frames import Forged
from elastic3d.trust.handshake import Answering, Dialling, HandshakeRejected, PortRole
from elastic3d.trust.listening import family
from elastic3d.trust.stream import Stream

STANDING = select.EPOLLRDHUP
"""The event for which an established connection wakes its reader: its end. Beats are read when one is to be sent."""


class ReadResult(Enum):
    """The result of reading a connection."""

    NOTHING = "nothing"
    HEARD = "heard"
    ENDED = "ended"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Dial:
    """The connection to one peer, or the try to make one. `known`: it has proved to be the one we mean, and beats.

    refusal: how it was refused. distrust: why the answer from there was not believed, "" if nothing was wrong.
    moved_at: when it was last heard, or begun.
    """

    peer: RingPeer
    stream: Stream | None = None
    connected: bool = False
    greeted: bool = False
    refusal: str = ""
    distrust: str = ""
    moved_at: float = 0.0
    retry_at: float = 0.0
    opening: Dialling | None = field(default=None, repr=False)
    messages: Messages | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """Where it goes, for people."""
        return f"{self.peer.address}:{self.peer.port}"

    @property
    def socket(self) -> socket.socket | None:
        """The connection, None for none."""
        return None if self.stream is None else self.stream.socket

    @property
    def known(self) -> bool:
        """Whether it has proved itself."""
        return self.messages is not None

    @property
    def mask(self) -> int:
        """The epoll events for which it wakes its reader."""
        if self.known:
            return STANDING
        return select.EPOLLIN if self.connected else select.EPOLLIN | select.EPOLLOUT

    def open(self, credentials: Credentials, encryption: Encryption | None, now: float) -> ReadResult:
        """Begin anew."""
        self.close()
        try:
            connection = socket.socket(family(self.peer.address), socket.SOCK_STREAM)
        except OSError:
            return ReadResult.ENDED
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = Stream(connection, encryption, answers=False)
        self.distrust, self.moved_at = "", now
        try:
            self.opening = Dialling(credentials, PortRole.LINK, meant=self.peer.id)
            code = connection.connect_ex((self.peer.address, self.peer.port))
        except (OSError, OverflowError, TypeError, ValueError):
            # A record with an invalid address: this peer is heard by nobody, the others are.
            code = errno.EADDRNOTAVAIL
        return ReadResult.NOTHING if code in (0, errno.EINPROGRESS) else self._failed(code)

    def read(self, now: float) -> ReadResult:
        """Take the connection's news: it is established, it answers, it beats, or it ended."""
        if self.stream is None:
            return ReadResult.NOTHING
        if not self.connected:
            code = self.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                return self._failed(code)
            self.connected = True
            return ReadResult.NOTHING if self.stream.begin() and self._greet(self.stream) else ReadResult.ENDED
        try:
            data = self.stream.receive()
            if not self._greet(self.stream) or data == b"":
                return ReadResult.ENDED
            if data is None:
                return ReadResult.NOTHING
            if self.messages is None:
                return self._answered(self.stream, data, now)
            if not self.messages.take(data):
                return ReadResult.NOTHING
        except HandshakeRejected as error:
            return self._rejected(error)
        except (Forged, Garbled) as error:
            self.distrust = str(error)
            return ReadResult.ENDED
        self.moved_at = now
        return ReadResult.HEARD

    def _greet(self, stream: Stream) -> bool:
        """Send who dials, once, as soon as it can be sent; return False if the connection ended."""
        if self.greeted or not stream.agreed:
            return True
        assert self.opening is not None
        self.greeted = True
        self.opening.bind(stream.binding)
        return stream.send(self.opening.hello)

    def _answered(self, stream: Stream, data: bytes, now: float) -> ReadResult:
        assert self.opening is not None
        proof = self.opening.feed(data)
        answerer = self.opening.peer
        if answerer is None:
            return ReadResult.NOTHING
        if answerer.id != self.peer.id:
            return self._refused(f"answers as {answerer.id[:100]!r}, not as {self.peer.id}")
        if not stream.send(proof):
            return ReadResult.ENDED
        stream.proved()
        self.messages = Messages(answerer.keys, answerer.rest)
        self.moved_at = now
        return ReadResult.HEARD

    def _rejected(self, error: HandshakeRejected) -> ReadResult:
        if error.foreign:
            return self._refused(f"answers, but {error}; another program than {self.peer.id}'s")
        # It may be something in between, or a node of an etcd that was emptied: that is no death.
        self.distrust = f"answers for {self.peer.id}, but {error}"
        return ReadResult.ENDED

    def beat(self) -> bool:
        """Send a beat, once known, or what is left to send; return False if the connection ended."""
        if self.stream is None or not self.connected:
            return True
        return self.stream.flush() if self.messages is None else self.messages.beat(self.stream)

    def say(self, message: Message) -> bool:
        """Send a message; return False if it cannot be sent, for now or for good."""
        return self.stream is not None and self.messages is not None and self.messages.say(self.stream, message)

    def said(self) -> list[Message]:
        """Return the questions and answers since the last time."""
        return [] if self.messages is None else self.messages.taken()

    def close(self) -> None:
        """End the connection."""
        if self.stream is not None:
            self.stream.hang_up()
        self.stream, self.connected, self.greeted, self.opening, self.messages = None, False, False, None, None

    def _failed(self, code: int) -> ReadResult:
        return self._refused("refuses the heartbeat connection") if code == errno.ECONNREFUSED else ReadResult.ENDED

    def _refused(self, how: str) -> ReadResult:
        self.refusal = f"{self.where} {how}"
        return ReadResult.REFUSED


@dataclass(slots=True, eq=False)
class Guest:
    """A node that dialled us from `address`. `known`: it has proved that it is of the run, and beats.

    id: its own, if it means us. distrust: why it was not believed, "" if nothing was wrong. farewell: what it is sent
    in that case.
    """

    stream: Stream
    address: str
    moved_at: float
    me: str
    opening: Answering = field(repr=False)
    id: str = ""
    distrust: str = ""
    farewell: bytes = b""
    messages: Messages | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """Where it comes from, for people."""
        return self.address

    @property
    def socket(self) -> socket.socket:
        """The connection."""
        return self.stream.socket

    @property
    def known(self) -> bool:
        """Whether it has proved itself."""
        return self.messages is not None

    @property
    def mask(self) -> int:
        """The epoll events for which it wakes its reader."""
        return STANDING if self.known else select.EPOLLIN

    def read(self, now: float) -> ReadResult:
        """Take a step of its proof and answer it, or take its beats."""
        try:
            data = self.stream.receive()
            if data is None:
                return ReadResult.NOTHING
            if not data:
                if not (self.known or (self.opening.untouched and self.stream.untouched)):
                    self.distrust = "went away before it had proved itself"
                return ReadResult.ENDED
            if self.messages is None:
                return self._greeted(data, now)
            if not self.messages.take(data):
                return ReadResult.NOTHING
        except HandshakeRejected as error:
            self.distrust, self.farewell = str(error), error.farewell
            return ReadResult.ENDED
        except (Forged, Garbled) as error:
            self.distrust = str(error)
            return ReadResult.ENDED
        self.moved_at = now
        return ReadResult.HEARD

    def _greeted(self, data: bytes, now: float) -> ReadResult:
        reply = self.opening.feed(data)
        if reply and not self.stream.send(reply):
            return ReadResult.ENDED
        caller = self.opening.peer
        if caller is None:
            return ReadResult.NOTHING
        self.stream.proved()
        self.messages = Messages(caller.keys, caller.rest)
        if caller.meant == self.me:
            self.id = caller.id
        self.moved_at = now
        return ReadResult.HEARD

    def beat(self) -> bool:
        """Send a beat, once known, or what is left to send; return False if the connection ended."""
        return self.stream.flush() if self.messages is None else self.messages.beat(self.stream)

    def say(self, message: Message) -> bool:
        """Send a message; return False if it cannot be sent, for now or for good."""
        return self.messages is not None and self.messages.say(self.stream, message)

    def said(self) -> list[Message]:
        """Return the questions and answers since the last time."""
        return [] if self.messages is None else self.messages.taken()

    def close(self) -> None:
        """End the connection."""
        self.stream.hang_up(self.farewell)
