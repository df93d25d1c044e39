"""Messages between a generation's table and its guests, over a proved connection.

A message is four bytes of length, JSON and its seal (`trust/frames.py`); an answer likewise.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from elastic3d.trust.frames import SEAL_BYTES, Seals
from elastic3d.trust.handshake import Peer

LONGEST = 64 * 2**20
"""Bytes of the longest message; a peer that announces more does not speak this protocol."""

NOTHING = object()
"""No complete message."""


class Frames:
    """Messages of one proved connection, in both directions."""

    def __init__(self, peer: Peer) -> None:
        self._sent, self._received = Seals(peer.keys.send), Seals(peer.keys.receive)
        self._inbox = bytearray(peer.rest)

    def pack(self, value: Any) -> bytes:
        """Return a message to send."""
        body = json.dumps(value, separators=(",", ":")).encode()
        return len(body).to_bytes(4, "big") + body + self._sent.next(body)

    def take(self, data: bytes) -> None:
        """Take in what arrived."""
        self._inbox += data

    def next(self) -> Any:
        """Return the next complete message, `NOTHING` if there is none; raises ValueError, Forged, RecursionError."""
        inbox = self._inbox
        if len(inbox) < 4:
            return NOTHING
        end = 4 + int.from_bytes(inbox[:4], "big")
        if end > LONGEST:
            raise ValueError(f"a message of {end} bytes")
        if len(inbox) < end + SEAL_BYTES:
            return NOTHING
        body = bytes(inbox[4:end])
        self._received.check(body, bytes(inbox[end : end + SEAL_BYTES]))
        del inbox[: end + SEAL_BYTES]
        return json.loads(body)


def family(address: str) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
