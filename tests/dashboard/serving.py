"""A page that is served in this process, and a browser of few words."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from elastic3d.dashboard.access import PageAccess
from elastic3d.dashboard.differences import apply
from elastic3d.dashboard.feed import ViewFeed
from elastic3d.dashboard.serving import PageServer, PageSettings

VIEW: dict[str, Any] = {
    "title": "gpt-1b: training",
    "away": "",
    "parts": {
        name: f"<b>{name}</b>"
        for name in (
            *("job", "figures", "warnings", "outside", "layout", "counts"),
            *("checkpoints", "generations", "findings", "events", "steps"),
            *("store", "store_state", "store_before", "store_after"),
        )
    },
    "nodes": {"order": ["a@1"], "rows": {"a@1": '<tr data-key="a@1"></tr>'}},
    "mesh": {},
    "series": {},
}


@dataclass(slots=True)
class Served:
    """The feed, the port it is served at, and orders that were given."""

    feed: ViewFeed
    port: int
    orders: list[dict[str, Any]] = field(default_factory=list)

    def get(self, path: str = "/", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        return ask(self.port, "GET", path, headers)


def ask(
    port: int, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """Return a response, with what it says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@contextmanager
def serving(*, token: str = "", give: Callable[[dict[str, Any]], str] | None = None, **more: Any) -> Iterator[Served]:
    """Serve a feed with one view."""
    feed = ViewFeed()
    feed.publish(VIEW, 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        access = PageAccess(token=token)
        server = PageServer(feed, PageSettings(access=access, port=port, give=give, hurry=lambda: None, **more))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(feed, port)
        finally:
            server.handle_exit(15, None)
            thread.join(20)
            assert not thread.is_alive()


class Stream:
    """A browser that follows the page. state: what it shows."""

    def __init__(self, port: int, *, compressed: bool = False, path: str = "/stream", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        accepted = {"accept-encoding": "gzip"} if compressed else {}
        self._connection.request("GET", path, headers={**accepted, **headers})
        self.response = self._connection.getresponse()
        self._unpack = zlib.decompressobj(31) if compressed else None
        self._text = b""
        self.state: dict[str, Any] = {}

    def next(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next event and return its kind and data."""
        while True:
            event, separator, rest = self._text.partition(b"\n\n")
            if separator:
                self._text = rest
                lines = dict(line.split(": ", 1) for line in event.decode().splitlines())
                if "event" not in lines:
                    continue
                data = json.loads(lines["data"])["data"]
                self.state = apply(data, self.state) if lines["event"] == "change" else data or self.state
                return lines["event"], data
            part = self.response.read1(65536)
            if not part:
                raise EOFError
            self._text += self._unpack.decompress(part) if self._unpack is not None else part

    def until(self, condition: Callable[[dict[str, Any]], bool], most: int = 100) -> dict[str, Any]:
        """Wait until `condition` holds of the state; within as many events."""
        for _ in range(most):
            if self.state and condition(self.state):
                return self.state
            self.next()
        raise AssertionError(f"not within {most} events: {self.state}")

    def close(self) -> None:
        self.response.close()
        self._connection.close()
