"""A stranger on the network: the ports on which processes listen, and somebody who connects to them without a right."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from elastic3d.clock import SYSTEM
from elastic3d.trust.listening import family

_LISTENS = "0A"
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that is reset when it is closed: a flood leaves nothing waiting in this machine."""
_BYTES = 4096
_PATIENCE = 1.0
_MOST = 16
"""Connections that are open at a time, of each port, until the other end closes them."""
_FLOOD = 256
"""The same of a flood, which closes the oldest for a new one."""

Port = tuple[str, int]
"""An address and a TCP port."""


class How(StrEnum):
    """What a stranger does with its connections."""

    SILENT = "silent"
    GARBAGE = "garbage"
    FLOOD = "flood"


def sockets(pids: Iterable[int]) -> dict[str, Port]:
    """Return the TCP sockets on which processes listen, by their inodes, which name a socket while it is there."""
    listening: dict[str, Port] = {}
    # The kernel goes through all that could be connections to list them: once for each network is enough.
    of_networks: dict[str, dict[str, Port]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            network = os.readlink(f"/proc/{pid}/ns/net")
            if network not in of_networks:
                of_networks[network] = listeners(f"/proc/{pid}")
            inodes = {_inode(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            listening |= {inode: port for inode, port in of_networks[network].items() if inode in inodes}
    return listening


def listeners(proc: str = "/proc/self") -> dict[str, Port]:
    """Return all TCP sockets that listen where a process is, by their inodes."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path(proc, "net", name))]
    return {row[9]: _port(row[1]) for row in rows if row[3] == _LISTENS}


class Stranger:
    """Somebody who connects to `ports` from now on, again and again, until `close`."""

    def __init__(self, ports: Iterable[Port], how: How) -> None:
        self._ports, self._how = tuple(ports), how
        self._ended = threading.Event()
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="stranger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all its connections."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        flood = self._how is How.FLOOD
        held = {port: deque[socket.socket]() for port in self._ports}
        while not self._ended.is_set():
            for port, connections in held.items():
                if flood and len(connections) == _FLOOD:
                    connections.popleft().close()
                elif not flood:
                    _drop_closed(connections)
                    if len(connections) == _MOST:
                        continue
                with contextlib.suppress(OSError):
                    connections.append(self._connection(port))
                    self.connections += 1
            SYSTEM.sleep(0.001 if flood else 0.25)
        for connections in held.values():
            for connection in connections:
                connection.close()

    def _connection(self, port: Port) -> socket.socket:
        connection = socket.socket(family(port[0]), socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.settimeout(_PATIENCE)
            connection.connect(port)
            if self._how is How.GARBAGE:
                connection.sendall(random.randbytes(_BYTES))
        except OSError:
            connection.close()
            raise
        return connection


def _drop_closed(connections: deque[socket.socket]) -> None:
    """Forget the connections that the other end has closed."""
    for connection in list(connections):
        try:
            closed = not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            closed = False
        except OSError:
            closed = True
        if closed:
            connections.remove(connection)
            connection.close()


def _inode(path: Path) -> str:
    try:
        return os.readlink(path).removeprefix("socket:[").removesuffix("]")
    except OSError:  # it was closed meanwhile
        return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except OSError:
        return []


def _port(text: str) -> Port:
    """Return what the kernel writes as words of the machine's byte order in hex, and a port."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
