"""The frames after a handshake: each carries a digest keyed for its direction and place in the sequence.

A frame that was changed, left out, repeated or sent back is noticed. They are not encrypted: that is the job of TLS.
"""

from __future__ import annotations

import hmac

from blake3 import blake3

SEAL_BYTES = 16


class Forged(Exception):
    """A frame is not what the other side sent: the connection cannot be trusted any more."""


class Seals:
    """Makes, or checks, the seals of one direction of a connection, frame after frame."""

    def __init__(self, key: bytes, size: int = SEAL_BYTES) -> None:
        self._key, self._size, self._count = key, size, 0

    def next(self, body: bytes | bytearray) -> bytes:
        """Return the seal of the next frame."""
        hasher = blake3(self._count.to_bytes(8, "big"), key=self._key)
        self._count += 1
        return hasher.update(body).digest(self._size)

    def check(self, body: bytes | bytearray, seal: bytes) -> None:
        """Check the next frame; Forged if it is not that."""
        if not hmac.compare_digest(self.next(body), seal):
            raise Forged("a frame was forged, lost or repeated on its way")
