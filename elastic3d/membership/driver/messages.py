"""What goes over a heartbeat connection that stands: beats, and the questions and answers of `witness`.

A message is a kind (1 byte), the length of its body (2 bytes, big-endian), the body and a seal (8 bytes) over all of it
and its place in the sequence (`trust/frames.py`): nobody else can make one, and each counts once.

    BEAT    nothing: that it arrives says enough
    ASK     a number of the asker's own (4 bytes) and the id of a neighbour: is it refused there too?
    ANSWER  that number and a verdict (1 byte)

Its version is that of the handshake, which refuses any other by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from elastic3d.membership.driver.witness import TryResult
from elastic3d.trust.frames import Frames, FrameShape, FrameTooLong
from elastic3d.trust.handshake import LIMIT, Keys
from elastic3d.trust.stream import Stream

SHAPE = FrameShape(most=LIMIT, kind_bytes=1, length_bytes=2, seal_bytes=8)
"""Of a message; an id that was said in a handshake is shorter than its longest body."""

MOST_TAKEN = 16
"""Most questions and answers that may wait to be read: further ones are dropped, as if they had been lost."""


class Kind(IntEnum):
    """The kind of a message, its first byte."""

    BEAT = 0
    ASK = 1
    ANSWER = 2


class Garbled(Exception):
    """The other side sent something that is not a message: the connection cannot be trusted any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The sender was refused by `id`, and wants to know whether the receiver is too."""

    number: int
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The outcome of the try that the question of this number asked for."""

    number: int
    verdict: TryResult


Message = Ask | Answer


class Messages:
    """The messages of one connection, in both directions."""

    def __init__(self, keys: Keys, rest: bytes) -> None:
        self._frames = Frames(SHAPE, keys, rest)
        self._taken: list[Message] = []

    def beat(self, stream: Stream) -> bool:
        """Send a beat, or the unsent rest of the last message; return False if the connection ended.

        While its buffer is full no beat is sent: the other side is not reading, and misses nothing.
        """
        if stream.unsent:
            return stream.flush()
        return stream.send(self._sealed(Kind.BEAT, b""))

    def say(self, stream: Stream, message: Message) -> bool:
        """Send a message; return False if the connection ended, or takes none for now."""
        return not stream.unsent and stream.send(self._sealed(*_written(message)))

    def take(self, data: bytes) -> bool:
        """Take in what arrived; return whether a message was whole. Forged, Garbled."""
        self._frames.take(data)
        heard = False
        try:
            while (frame := self._frames.next_kind()) is not None:
                heard = True
                (kind,), body = frame
                parsed = _read(kind, body)
                if parsed is not None and len(self._taken) < MOST_TAKEN:
                    self._taken.append(parsed)
        except FrameTooLong as error:
            raise Garbled(f"sent what is no message: {error}") from error
        return heard

    def taken(self) -> list[Message]:
        """Return the questions and answers since the last time."""
        taken, self._taken = self._taken, []
        return taken

    def _sealed(self, kind: Kind, body: bytes) -> bytes:
        return self._frames.pack(body, bytes([kind]))


def _written(message: Message) -> tuple[Kind, bytes]:
    number = message.number.to_bytes(4, "big")
    if isinstance(message, Ask):
        return Kind.ASK, number + message.id.encode(errors="surrogateescape")
    return Kind.ANSWER, number + bytes([message.verdict])


def _read(kind: int, body: bytes) -> Message | None:
    """Return the message, None for a beat; raises Garbled."""
    number = int.from_bytes(body[:4], "big")
    if kind == Kind.BEAT and not body:
        return None
    if kind == Kind.ASK and len(body) > 4:
        return Ask(number=number, id=body[4:].decode(errors="surrogateescape"))
    if kind == Kind.ANSWER and len(body) == 5 and body[4] in list(TryResult):
        return Answer(number=number, verdict=TryResult(body[4]))
    raise Garbled(f"sent something that is no message: {len(body)} bytes of kind {kind}")
