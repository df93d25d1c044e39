"""What can go wrong between a client and its object store, by a script: a proxy that fails real requests."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(slots=True)
class Wire:
    """What the proxy does with requests for which `where(method, path)` is true; `times` of them."""

    url: str = ""
    where: Callable[[str, str], bool] = lambda method, path: False
    times: int = 1 << 30
    fault: str = ""  # strip, flip, lose, answer, deny, busy
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def break_(self, fault: str, where: Callable[[str, str], bool], times: int = 1 << 30) -> None:
        """From now on: `strip` conditions, `flip` a bit of the body, `lose` the request, lose the `answer`, `deny` it,
        or say `busy`.
        """
        self.fault, self.where, self.times = fault, where, times

    def take(self, method: str, path: str) -> str:
        with self.lock:
            if self.times > 0 and self.where(method, path):
                self.times -= 1
                self.seen.append(f"{method} {path}")
                return self.fault
            return ""


@contextlib.contextmanager
def proxy(endpoint: str) -> Iterator[Wire]:
    """Run a proxy before `endpoint`; `Wire.url` is where clients go."""
    target = urlsplit(endpoint)
    wire = Wire()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def forward(self) -> None:
            fault = wire.take(self.command, self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if fault == "deny":
                self.say(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
                return
            if fault == "busy":
                self.say(503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>")
                return
            if fault == "lose":
                self.close_connection = True
                return
            if fault == "flip" and body:
                body = bytes([body[0] ^ 1]) + body[1:]
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
            if fault == "strip":
                headers = {k: v for k, v in headers.items() if k.lower() not in ("if-match", "if-none-match")}
            upstream = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
            try:
                # The name it was signed for stays, as with any proxy that does not end TLS.
                headers["Host"] = self.headers["Host"]
                upstream.request(self.command, self.path, body or None, headers)
                answer = upstream.getresponse()
                content = answer.read()
            finally:
                upstream.close()
            if fault == "answer":
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.getheaders():
                if key.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                    self.send_header(key, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def say(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    wire.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield wire
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
