"""Unix sockets between the processes of one node: frames, and whose process is at the other end.

They listen under abstract names, which are gone with their process and leave nothing to clean up. Such a name has no
permissions: both ends therefore ask the kernel for the user of the other process. A frame is a length and a JSON
object; descriptors may follow one.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any, cast

from elastic3d.trust.frames import Frames, FrameShape

_SHAPE = FrameShape(most=64 << 20, order="little")
_READ_AT_ONCE = 1 << 20


def listen(name: str, backlog: int = 16) -> socket.socket:
    """Return a socket that listens under an abstract name; OSError if somebody has that name."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind("\0" + name)
        listening.listen(backlog)
    except BaseException:
        listening.close()
        raise
    return listening


def connect(name: str, patience: float | None = None) -> socket.socket:
    """Return a connection to the listener of a name; OSError if there is none, or it is another user's process.

    patience: seconds that connecting, and each later call, may take; None for no limit.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(patience)
        connection.connect("\0" + name)
        user = user_of(connection)
        if user != os.geteuid():
            raise PermissionError(f"a process of user {user} listens there, not one of user {os.geteuid()}")
    except BaseException:
        connection.close()
        raise
    return connection


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

    Nothing behind it is read: descriptors may follow.
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
