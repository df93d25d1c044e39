"""Frames: a length, a body and, once both sides have proved who they are, a seal. One way for every connection of ours.

What differs between ports is a `FrameShape`: tile server, table, heartbeats, and the sockets of one node. A seal is a
digest keyed for its direction and its place in the sequence: a frame that was changed, left out, repeated or sent back
is noticed. Not encrypted: that is TLS's to do.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from typing import Any, Literal

from blake3 import blake3

from elastic3d.trust.handshake import Keys

SEAL_BYTES = 16


class Forged(Exception):
    """A frame is not what the other side sent: the connection cannot be trusted any more."""


class FrameTooLong(ValueError):
    """The other side announces a frame that is none of this port's: it does not speak its language."""


class Seals:
    """Makes, or checks, the seals of one direction of a connection, frame after frame."""

    def __init__(self, key: bytes, size: int = SEAL_BYTES) -> None:
        self._key, self._size, self._count = key, size, 0

    def next(self, body: bytes | bytearray) -> bytes:
        """Return the seal of the next frame."""
        hasher = blake3(self._count.to_bytes(8, "big"), key=self._key)
        self._count += 1
        return hasher.update(body).digest(self._size)

    def check(self, body: bytes | bytearray, seal: bytes | bytearray) -> None:
        """Take the next frame; Forged where it is not that."""
        if not hmac.compare_digest(self.next(body), seal):
            raise Forged("a frame was forged, lost or repeated on its way")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """How the frames of one kind of connection look."""

    most: int
    """Bytes of the longest body: more is not waited for."""
    length_bytes: int = 4
    """Of the length, which says how long the body is."""
    order: Literal["big", "little"] = "big"
    """Of the length's bytes."""
    kind_bytes: int = 0
    """Before the length: what kind of frame it is. The seal then covers the whole head as well."""
    seal_bytes: int = SEAL_BYTES
    """Of the seal behind the body, where there are keys for it."""

    @property
    def head_bytes(self) -> int:
        """Bytes before the body."""
        return self.kind_bytes + self.length_bytes


class Frames:
    """Both directions of one connection's frames; holds no socket, and no more memory than what arrived.

    keys: what frames are sealed with, None for a connection between processes of one user. rest: what arrived already.
    """

    def __init__(self, shape: FrameShape, keys: Keys | None = None, rest: bytes = b"") -> None:
        self._shape = shape
        self._sent = Seals(keys.send, shape.seal_bytes) if keys is not None else None
        self._received = Seals(keys.receive, shape.seal_bytes) if keys is not None else None
        self._tail = shape.seal_bytes if keys is not None else 0
        self._inbox = bytearray(rest)

    def pack(self, body: bytes, kind: bytes = b"") -> bytes:
        """Return a frame to send."""
        head = kind + len(body).to_bytes(self._shape.length_bytes, self._shape.order)
        if self._sent is None:
            return head + body
        return b"".join((head, body, self._sent.next(head + body if kind else body)))

    def pack_json(self, value: Any) -> bytes:
        """Return a frame of plain JSON data to send."""
        return self.pack(json.dumps(value, separators=(",", ":")).encode())

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Take in what arrived, cut anywhere."""
        self._inbox += data

    @property
    def announced(self) -> int | None:
        """Bytes of the body that is to come next, None while its head is not there."""
        shape = self._shape
        if len(self._inbox) < shape.head_bytes:
            return None
        return int.from_bytes(self._inbox[shape.kind_bytes : shape.head_bytes], shape.order)

    @property
    def wanted(self) -> int:
        """Bytes that the next frame lacks, as far as can be told: never bytes of the one after it."""
        announced = self.announced
        if announced is None:
            return self._shape.head_bytes - len(self._inbox)
        return max(0, self._shape.head_bytes + announced + self._tail - len(self._inbox))

    def next(self) -> bytes | None:
        """Return the body of the next whole frame, None while it is not there; FrameTooLong, Forged."""
        frame = self.next_kind()
        return None if frame is None else frame[1]

    def next_kind(self) -> tuple[bytes, bytes] | None:
        """Return the kind and the body of the next whole frame, None while it is not there; FrameTooLong, Forged."""
        shape, inbox, size = self._shape, self._inbox, self.announced
        if size is None:
            return None
        if size > shape.most:
            raise FrameTooLong(f"a frame of {size} bytes; {shape.most} are the most")
        end = shape.head_bytes + size
        if len(inbox) < end + self._tail:
            return None
        kind, body = bytes(inbox[: shape.kind_bytes]), bytes(inbox[shape.head_bytes : end])
        if self._received is not None:
            sealed = bytes(inbox[:end]) if shape.kind_bytes else body
            self._received.check(sealed, bytes(inbox[end : end + self._tail]))
        del inbox[: end + self._tail]
        return kind, body
