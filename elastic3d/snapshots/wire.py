"""Frames of the tile servers' protocol: a length (4 bytes, big-endian), a JSON object, then raw bytes where it says so.

Requests, each answered before the next on its connection:

    {"op": "hello", "run" or null, "version"} -> {"ok"}, refused where the run is another; null may only read
    {"op": "inventory"}                       -> {"tables": {identity: table}, "snapshots": [...]}
    {"op": "fetch", "ranges": [[generation, step, rank, offset, nbytes], ...]}
                                              -> {"sizes": [nbytes or -1, ...]}, then these bytes
    {"op": "replicate", "generation", "step", "rank", "world", "facts", "keep", "identity", "table" or null}
                                              -> {"ok"}, {"table"} (send it with its table) or {"stale"};
       after {"ok"}, for each run of tiles: its digests (32 bytes each), its bytes; then <- {"held"}

A refusal is {"error": text}. Every byte received is checked against its digest by the receiver.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

VERSION = 1
CONNECT_SECONDS = 1.0
SILENCE_SECONDS = 5.0
_LENGTH = struct.Struct(">I")
_FRAME_LIMIT = 1 << 30
_SOCKET_BYTES = 4 << 20


class WireError(Exception):
    """The other side is gone, silent, or does not speak this protocol. Another source may help."""


def parse_address(server: str) -> tuple[str, int]:
    """Return host and port of "host:port" (an IPv6 host in brackets); ValueError where it is none."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'a tile server is named "host:port"; got {server!r}')
    return host.strip("[]"), int(port)


def connect(server: str, run_id: str | None) -> socket.socket:
    """Return a connection to a tile server of this run; WireError if there is none."""
    try:
        connection = socket.create_connection(parse_address(server), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise WireError(f"{server}: {error}") from error
    try:
        tune(connection)
        send(connection, {"op": "hello", "run": run_id, "version": VERSION})
        answer = receive(connection)
        if "ok" not in answer:
            raise WireError(f"{server}: {answer.get('error', answer)}")
    except BaseException:
        connection.close()
        raise
    return connection


def tune(connection: socket.socket) -> None:
    """Set the silence limit, and buffers that let hashing and sending overlap."""
    connection.settimeout(SILENCE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)


def send(connection: socket.socket, frame: dict[str, Any]) -> None:
    """Send one frame; WireError."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    send_bytes(connection, _LENGTH.pack(len(body)) + body)


def send_bytes(connection: socket.socket, data: bytes | memoryview) -> None:
    """Send raw bytes; WireError."""
    view = memoryview(data)
    try:
        # The silence limit is for each part, not for the whole.
        for start in range(0, len(view), _SOCKET_BYTES):
            connection.sendall(view[start : start + _SOCKET_BYTES])
    except OSError as error:
        raise WireError(str(error) or type(error).__name__) from error


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return the next frame; WireError, also at the end."""
    (size,) = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    if size > _FRAME_LIMIT:
        raise WireError("the other side does not speak the tile protocol")
    try:
        frame = json.loads(receive_bytes(connection, size))
    except ValueError as error:
        raise WireError("the other side does not speak the tile protocol") from error
    if not isinstance(frame, dict):
        raise WireError("the other side does not speak the tile protocol")
    return frame


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """Return exactly `size` raw bytes; WireError."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return data


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target` with raw bytes; WireError."""
    at = 0
    try:
        while at < len(target):
            count = connection.recv_into(target[at:])
            if not count:
                raise WireError("the other side has closed the connection")
            at += count
    except OSError as error:
        raise WireError(str(error) or type(error).__name__) from error
