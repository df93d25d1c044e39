"""HTTP to the server that a cloud gives each machine for facts about itself.

The address is link-local, one hop away: no proxy, no redirect, a connection per request. `close` from another thread
ends a hanging `ask` by shutting down its socket.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

ADDRESS = "http://169.254.169.254"
"""The same for AWS, Google Cloud and Azure; an address, not a name, so that no resolver is needed."""

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0
LARGEST = 1 << 20


class Unheard(Exception):
    """The server did not answer, or not as documented; the next try may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataResponse:
    """One answer. `asked` names the request, for errors; names of `headers` are case-insensitive."""

    asked: str
    status: int
    headers: Message
    body: bytes

    def ok(self) -> MetadataResponse:
        """Return this answer if its status is 200; Unheard otherwise."""
        if self.status != 200:
            raise Unheard(f"{self.asked} was answered {self.status}: {self.text()[:200]}")
        return self

    def now(self, wall: float) -> float:
        """Return the wall time at which it was given: `wall`, by this machine's clock, unless it says another second.

        Its `Date` is by the clock of the cloud, by which all that it announces is as well.
        """
        try:
            second = parsedate_to_datetime(self.headers.get("Date", "")).timestamp()
        except (ValueError, OverflowError):
            return wall
        return min(max(wall, second), second + 1.0)

    def text(self) -> str:
        """Return the body as text, without white space around it."""
        return self.body.decode(errors="replace").strip()

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; Unheard if it is not one."""
        try:
            data = json.loads(self.body)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise Unheard(f"{self.asked} was answered by something that is not a JSON object: {self.text()[:200]}")
        return data


class Metadata:
    """A client of the server at `base`, http(s)://host[:port]. Threads may share it."""

    def __init__(self, base: str = ADDRESS) -> None:
        self._base = base
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: float = ANSWER_SECONDS,
    ) -> MetadataResponse:
        """Return the answer, whatever its status; Unheard if none comes within `timeout` seconds, or after close."""
        asked = f"{method} {self._base}{path}"
        connection = self._connection(min(timeout, CONNECT_SECONDS))
        held: socket.socket | None = None
        try:
            connection.connect()
            held = connection.sock
            held.settimeout(timeout)
            with self._lock:
                if self._closed:
                    raise Unheard(f"{asked}: closed")
                self._open.add(held)
            connection.request(method, path, body=body, headers=dict(headers or {}))
            response = connection.getresponse()
            return MetadataResponse(
                asked=asked, status=response.status, headers=response.headers, body=response.read(LARGEST)
            )
        except (OSError, http.client.HTTPException) as error:
            raise Unheard(f"{asked}: {error or type(error).__name__}") from error
        finally:
            if held is not None:
                with self._lock:
                    self._open.discard(held)
            connection.close()

    def close(self) -> None:
        """End all requests under way, and refuse new ones."""
        with self._lock:
            self._closed = True
            for held in self._open:
                try:
                    held.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # The other end was quicker.

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        parts = urlsplit(self._base)
        assert parts.hostname is not None, "options let no other base through"
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
