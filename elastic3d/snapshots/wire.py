"""The protocol of tile servers, and how to connect to one.

A connection opens with the handshake of the run (`trust/handshake.py`); `trust/channel.py` has the frames. Requests,
each answered before the next on its connection:

    {"op": "inventory"}                       -> {"tables": {identity: table}, "snapshots": [...]}
    {"op": "fetch", "ranges": [[generation, step, rank, offset, nbytes], ...]}
                                              -> {"sizes": [nbytes or -1, ...]}, then these bytes
    {"op": "replicate", "generation", "step", "rank", "world", "facts", "keep", "base": [generation, step] or null,
     "identity", "table" or null}
                                              -> {"ok"}, {"table"} (send it with its table), {"stale"} or {"denied"};
       after {"ok"}, for each run of tiles: a frame of its digests (32 bytes each), its bytes; then <- {"held"}

{"denied": text}: by the sealed record this peer may not send it, and there is no use in sending it again. Any other
refusal is {"error": text}. The receiver checks every byte against its digest, and every digest comes in a sealed frame.
"""

from __future__ import annotations

import socket

from elastic3d.trust.channel import Channel, WireError, dial
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import dial_encrypted
from elastic3d.trust.handshake import HandshakeRejected, PortRole

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Seconds for the whole handshake."""

_TRIES = 3
_SOCKET_BYTES = 4 << 20


class HandshakeInterrupted(WireError):
    """The connection ended in its handshake: the server was busy, or this process was late. Trying again may help."""


def parse_address(server: str) -> tuple[str, int]:
    """Return host and port of "host:port" (an IPv6 host in brackets); ValueError for anything else."""
    host, _, port = server.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'a tile server is named "host:port"; got {server!r}')
    return host.strip("[]"), int(port)


def connect(server: str, credentials: Credentials) -> Channel:
    """Return a connection to a tile server of this run; WireError if there is none."""
    for _ in range(_TRIES - 1):
        try:
            return _connect(server, credentials)
        except HandshakeInterrupted:
            continue
    return _connect(server, credentials)


def _connect(server: str, credentials: Credentials) -> Channel:
    try:
        connection = socket.create_connection(parse_address(server), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise WireError(f"{server}: {error}") from error
    try:
        tune(connection)
        connection.settimeout(ANSWER_SECONDS)
        connection, binding = dial_encrypted(connection, credentials)
        return dial(connection, credentials, PortRole.TILES, binding=binding, seconds=ANSWER_SECONDS)
    except HandshakeRejected as error:
        connection.close()
        raise WireError(f"{server}: the process at this address {error}") from error
    except WireError as error:
        connection.close()
        kind = HandshakeInterrupted if isinstance(error.__cause__, ConnectionError) else WireError
        raise kind(f"{server}: {error}") from error
    except (OSError, ValueError) as error:
        connection.close()
        kind = HandshakeInterrupted if isinstance(error, ConnectionError) else WireError
        raise kind(f"{server}: {error}") from error


def tune(connection: socket.socket) -> None:
    """Set buffers that let hashing and sending overlap."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
