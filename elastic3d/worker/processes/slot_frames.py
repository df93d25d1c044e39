"""Frames between the keepers of a node, the names they meet under, and whose process is at the other end.

A frame is a length and a JSON object.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, cast

from blake3 import blake3

_LENGTH = struct.Struct("<I")
_LONGEST = 64 << 20
_READ_AT_ONCE = 1 << 20


def private_name(token: str, *parts: object) -> str:
    """Return the abstract name of `parts`, which only processes that know the token can tell.

    Every user can list the names in use: one that showed the token would let another user take the next one first.
    """
    said = "\0".join(map(str, (token, *parts)))
    return f"elastic3d-{blake3(said.encode(), derive_key_context='elastic3d slot names').hexdigest(16)}"


def user_of(connection: socket.socket) -> int:
    """Return the user of the process at the other end, which connected or listened."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def frame_of(content: dict[str, Any]) -> bytes:
    """Return a frame's bytes."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, content: dict[str, Any]) -> None:
    """Send one frame whole."""
    connection.sendall(frame_of(content))


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next frame, None at the end; ConnectionError for what is none."""
    head = _exactly(connection, _LENGTH.size)
    size = 0 if head is None else _LENGTH.unpack(head)[0]
    if size > _LONGEST:
        raise ConnectionError(f"a frame of {size} bytes")
    body = None if head is None else _exactly(connection, size)
    try:
        return None if body is None else cast(dict[str, Any], json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"not a frame: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), _READ_AT_ONCE))
        if not part:
            return None
        data += part
    return bytes(data)
