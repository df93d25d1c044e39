"""The port that answers scrapes: one thread for all callers, a bounded number of them, each with little time.

It speaks as much of HTTP as a scrape needs: one GET or HEAD on a connection, which ends with the answer. Whoever
reaches the port may read the metrics; nothing that a caller sends is kept, and nothing in the process changes by it.
Callers cannot cost the keeper more than this:

- memory: `WAITING` connections of at most `MOST_HEAD` bytes, and one document that all of them share;
- time: a document is made at most once in `FRESH` seconds, and at most `MOST_SCRAPES` callers are accepted in a second;
  others wait in the system, or are turned away by it. A caller who has not asked, or not read, in `PATIENCE` seconds is
  hung up on.

A failure while a document is made is an answer of 500 and a count, and never more.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError
from elastic3d.metrics.address import MetricsAddress, shown
from elastic3d.trust.listening import Listener, Refusal, Refusals, Waiting, family

WAITING = 16
"""Most connections at one time."""

MOST_HEAD = 8192
"""Most bytes of a request: Prometheus sends some hundreds."""

PATIENCE = 3.0
"""Seconds that a caller has to ask and to read the answer."""

FRESH = 0.5
"""Seconds for which a document serves other callers too."""

MOST_SCRAPES = 50
"""Most callers accepted in a second: some servers of Prometheus, and people with curl."""

LOOKS = 0.5
"""Seconds between two looks for callers whose time is over."""

_QUEUED = 32
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
}

Document = Callable[[str], tuple[bytes, str]]
"""Makes the document for what a scraper accepts; returns it and its type."""


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection. until: when it is hung up on. answer: what is left to send, None while it has not asked."""

    socket: socket.socket
    address: str
    until: float
    head: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class MetricsServer:
    """Serves at `address` until `close`.

    own: the node's own address. failed: called, on the server's thread, when a document could not be made. refused:
    called there for callers who were turned away; neither may block. ConfigurationError if nobody can listen there.
    """

    def __init__(
        self,
        address: MetricsAddress,
        document: Document,
        *,
        own: str,
        failed: Callable[[Exception], None],
        refused: Callable[[Refusal], None] = lambda refusal: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._document, self._failed, self._clock = document, failed, clock
        self._refused = Refusals("metrics", refused, clock=clock)
        self._listener = Listener(_listening(address, own), self._refused)
        self.address = shown(str(self._listener.socket.getsockname()[0]), self._listener.port)
        self._callers: dict[socket.socket, _Caller] = {}
        self._waiting: Waiting[_Caller] = Waiting(WAITING)
        self._made: dict[bool, tuple[float, bytes, str]] = {}
        self._second, self._accepted = 0.0, 0
        self._listening = True
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._listener.socket, self._wake_in, self._wake_out):
            end.setblocking(False)
        self._poll = selectors.DefaultSelector()
        self._poll.register(self._listener.socket, selectors.EVENT_READ)
        self._poll.register(self._wake_in, selectors.EVENT_READ)
        self._closing = False
        self._thread = threads.start(self._run, name="elastic3d-metrics", edge=threads.Edge.AGAIN)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")
        self._thread.join(timeout=10)

    # The server's thread.

    def _run(self) -> None:
        while not self._closing:
            for key, events in self._poll.select(self._pause()):
                if key.fileobj is self._listener.socket:
                    self._accept()
                elif key.fileobj is not self._wake_in:
                    caller = self._callers.get(key.fileobj)  # type: ignore[call-overload]
                    if caller is not None:
                        self._serve(caller, events)
            self._look()
        for caller in list(self._callers.values()):
            self._end(caller)
        self._poll.close()
        self._listener.close()
        self._wake_in.close()
        self._wake_out.close()

    def _pause(self) -> float | None:
        if not self._listening:
            return max(0.0, min(LOOKS, self._second + 1.0 - self._clock.monotonic()))
        return LOOKS if self._callers else None

    def _look(self) -> None:
        now = self._clock.monotonic()
        for caller in [one for one in self._callers.values() if now >= one.until]:
            self._refused(caller.address, f"it took longer than {PATIENCE:g} s to ask, or to read")
            self._end(caller)
        if not self._listening and now >= self._second + 1.0:
            self._poll.register(self._listener.socket, selectors.EVENT_READ)
            self._listening = True

    def _accept(self) -> None:
        now = self._clock.monotonic()
        if now >= self._second + 1.0:
            self._second, self._accepted = now, 0
        if self._accepted >= MOST_SCRAPES:
            self._poll.unregister(self._listener.socket)
            self._listening = False
            self._refused("", f"more than {MOST_SCRAPES} callers in a second: the others wait")
            return
        self._accepted += 1
        accepted = self._listener.accept()
        if accepted is None or isinstance(accepted, float):
            if accepted:
                self._clock.sleep(accepted)
            return
        connection, address = accepted
        connection.setblocking(False)
        caller = _Caller(connection, address, now + PATIENCE)
        self._callers[connection] = caller
        self._poll.register(connection, selectors.EVENT_READ)
        crowded = self._waiting.add(caller, address)
        if crowded is not None:
            self._refused(crowded.address, "too many connections at one time")
            self._end(crowded)

    def _serve(self, caller: _Caller, events: int) -> None:
        try:
            if caller.answer is None and events & selectors.EVENT_READ:
                self._read(caller)
            if caller.answer is not None:
                sent = caller.socket.send(caller.answer)
                caller.answer = caller.answer[sent:]
                if not caller.answer:
                    self._end(caller)
        except BlockingIOError:
            pass
        except OSError:
            self._end(caller)

    def _read(self, caller: _Caller) -> None:
        part = caller.socket.recv(MOST_HEAD)
        if not part:
            self._end(caller)
            return
        caller.head += part
        if b"\r\n\r\n" in caller.head or b"\n\n" in caller.head:
            caller.answer = memoryview(self._answer(bytes(caller.head)))
        elif len(caller.head) > MOST_HEAD:
            caller.answer = memoryview(_response(431, b"too long\n"))
        if caller.answer is not None:
            self._poll.modify(caller.socket, selectors.EVENT_WRITE)

    def _end(self, caller: _Caller) -> None:
        if self._callers.pop(caller.socket, None) is None:
            return
        self._waiting.remove(caller)
        self._poll.unregister(caller.socket)
        with contextlib.suppress(OSError):
            caller.socket.shutdown(socket.SHUT_WR)
        caller.socket.close()

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").replace("\r\n", "\n").split("\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, b"this port speaks HTTP/1.1\n")
        method, path = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(405, b"GET or HEAD\n")
        if path == "/":
            return _response(200, b"elastic3d: metrics are at /metrics\n", head=method == "HEAD")
        if path != "/metrics":
            return _response(404, b"metrics are at /metrics\n", head=method == "HEAD")
        accept = ",".join(line.partition(":")[2] for line in lines[1:] if line.lower().startswith("accept:"))
        try:
            body, kind = self._fresh(accept)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with the metrics, training goes on
            self._failed(error)
            return _response(500, b"the metrics could not be read; elastic3d_metrics_failures_total counts it\n")
        return _response(200, body, kind, head=method == "HEAD")

    def _fresh(self, accept: str) -> tuple[bytes, str]:
        """Return the document, at most `FRESH` seconds old."""
        now, form = self._clock.monotonic(), "openmetrics" in accept
        kept = self._made.get(form)
        if kept is None or now - kept[0] >= FRESH:
            kept = self._made[form] = (now, *self._document(accept))
        return kept[1], kept[2]


def _response(code: int, body: bytes, kind: str = _TEXT, *, head: bool = False) -> bytes:
    lines = (
        f"HTTP/1.1 {code} {_REASONS[code]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + (b"" if head else body)


def _listening(address: MetricsAddress, own: str) -> socket.socket:
    host, port = address.at(own)
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4]
        at = str(place[0])
        return socket.create_server((at, port), family=family(at), backlog=_QUEUED)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"elastic3d.run(metrics={str(address)!r}): nobody can listen at {shown(host, port)} here ({reason}): give "
            "an address of this node and a port that nobody has, or port 0, which asks the system for one; nodes that "
            "share a machine need a port each"
        ) from error
