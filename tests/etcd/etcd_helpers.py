"""Helpers shared by the etcd tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until `condition` holds; fail if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Relay:
    """Stands in front of a server and counts its connections, from 0; a stalled one stays open and passes no data."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._stalled: set[int] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stalled.clear()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._ends:
            end.close()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._ends) // 2

    def stall(self, number: int) -> None:
        """Stop passing data over this connection."""
        self._stalled.add(number)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            number, far = self.connections, socket.create_connection(self._server)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(number, source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, number: int, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while number in self._stalled:
                    time.sleep(0.02)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
