"""Frames between the keepers of a node, the names they meet under, and whose process is at the other end.

A frame is a length and a JSON object.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, cast, get_args

from blake3 import blake3

from elastic3d.tagged import Tagged
from elastic3d.trust.frames import Frames, FrameShape
from elastic3d.worker.processes.events import SlotEvent

_SHAPE = FrameShape(most=64 << 20, order="little")
_READ_AT_ONCE = 1 << 20

EVENTS: Tagged[SlotEvent] = Tagged(get_args(SlotEvent))
"""What a companion keeper's slot reports, by the names of the events."""


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
    return Frames(_SHAPE).pack_json(content)


def send(connection: socket.socket, content: dict[str, Any]) -> None:
    """Send one frame whole."""
    connection.sendall(frame_of(content))


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next frame, None at the end; ConnectionError for what is none.

    Nothing behind it is read: a descriptor may follow.
    """
    frames = Frames(_SHAPE)
    try:
        while (body := frames.next()) is None:
            part = connection.recv(min(frames.wanted, _READ_AT_ONCE))
            if not part:
                return None
            frames.take(part)
        return cast(dict[str, Any], json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"not a frame: {error}") from error
