"""A port of the loopback address that leads to a server elsewhere, for clients that speak in the clear to no other."""

from __future__ import annotations

import contextlib
import socket

from elastic3d import threads

_PIECE = 1 << 16


def relay(host: str, port: int) -> int:
    """Return a port of this host's loopback address from where connections are passed on, until the process ends."""
    server = socket.create_server(("127.0.0.1", 0))
    threads.start(_serve, server, (host, port), name="elastic3d-relay")
    return int(server.getsockname()[1])


def _serve(server: socket.socket, there: tuple[str, int]) -> None:
    while True:
        near, _ = server.accept()
        try:
            far = socket.create_connection(there)
        except OSError:
            near.close()
            continue
        for one, other in ((near, far), (far, near)):
            threads.start(_pass, one, other, name="elastic3d-relay", edge=threads.Edge.ALONE)


def _pass(source: socket.socket, target: socket.socket) -> None:
    """Pass on what comes until that is over."""
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
