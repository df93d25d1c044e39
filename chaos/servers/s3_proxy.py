"""A proxy between an S3 client and its server that disturbs requests and answers as networks and disks do.

    with s3_proxy(server.port, [Harm(do=Do.UNANSWERED, method="PUT", path="/packs/")]) as proxy:
        store = open_store(url, options=s3.options(proxy.port))

A harm applies to the requests that it matches, as often as it says, at most one per request; all others pass as they
are. What was done is in `proxy.done`, in order.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

from chaos.servers.s3 import LOOPBACK

ALWAYS = 1 << 30
_CONDITIONS = ("if-match", "if-none-match")
_HOP = ("connection", "transfer-encoding", "keep-alive", "expect", "content-length", "te", "trailer", "upgrade")


class Do(StrEnum):
    """What can happen to a request."""

    REFUSE = "refuse"  # the connection is closed, the server never hears of it
    UNANSWERED = "unanswered"  # the server executes it, the connection is closed without an answer
    REPEAT = "repeat"  # the server gets it twice, the client the second answer
    ERROR = "error"  # 500, and the server never hears of it
    BUSY = "busy"  # 503 SlowDown, and the server never hears of it
    FULL = "full"  # 507 InsufficientStorage, and the server never hears of it
    DENY = "deny"  # 403 AccessDenied, and the server never hears of it
    SKEWED = "skewed"  # 403 RequestTimeTooSkewed, as where the client's clock is far off
    STRIP = "strip"  # it passes without the conditions of its headers
    ERROR_AFTER = "error-after"  # the server executes it, the client gets a 500
    TRUNCATE = "truncate"  # the answer ends in the middle of its body
    FLIP_ANSWER = "flip-answer"  # one bit of the answer's body is flipped
    FLIP_REQUEST = "flip-request"  # one bit of the request's body is flipped
    STALE = "stale"  # a list is answered as it was when it was asked for the last time before
    DELAY = "delay"  # it passes late


_REFUSALS = {
    Do.ERROR: (500, "InternalError"),
    Do.BUSY: (503, "SlowDown"),
    Do.FULL: (507, "InsufficientStorage"),
    Do.DENY: (403, "AccessDenied"),
    Do.SKEWED: (403, "RequestTimeTooSkewed"),
}


Answer = tuple[int, list[tuple[str, str]], bytes]
"""A status, headers and a body."""

LISTS = "list-type="
"""What the address of a list has, and no other."""


@dataclass(slots=True, kw_only=True)
class Harm:
    """Do this to requests of a method whose path contains `path`: not to the first `skip` of them, then to `times`.

    every: of those that are left, to one in so many, the last of them.
    """

    do: Do
    method: str = ""
    path: str = ""
    skip: int = 0
    times: int = 1
    every: int = 1
    seconds: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done to which request."""

    do: Do
    method: str
    path: str


class S3Proxy:
    """Where the proxy listens, and what it has done. Harms may be added while it runs."""

    def __init__(self, harms: Sequence[Harm], seed: int, sleep: Callable[[float], None]) -> None:
        self.port = 0
        self.harms = list(harms)
        self.done: list[Done] = []
        self.sleep = sleep
        self.random = Random(seed)
        self.lists: dict[str, Answer] = {}
        self._lock = threading.Lock()

    def choose(self, method: str, path: str) -> Harm | None:
        """Return the harm for this request."""
        with self._lock:
            for harm in self.harms:
                if harm.times and (not harm.method or harm.method == method) and harm.path in path:
                    if harm.skip:
                        harm.skip -= 1
                        continue
                    harm.skip = harm.every - 1
                    harm.times -= 1
                    self.done.append(Done(do=harm.do, method=method, path=path))
                    return harm
        return None

    def flipped(self, body: bytes) -> bytes:
        """Return `body` with one bit, drawn from the seed, flipped; unchanged if it is empty."""
        if not body:
            return body
        changed = bytearray(body)
        with self._lock:
            changed[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        return bytes(changed)


@contextlib.contextmanager
def s3_proxy(
    server: int,
    harms: Sequence[Harm] = (),
    *,
    seed: int = 0,
    sleep: Callable[[float], None] = time.sleep,
    host: str = LOOPBACK,
) -> Iterator[S3Proxy]:
    """Listen at an address of this machine, in front of port `server` of the loopback one, until the block ends."""
    proxy = S3Proxy(harms, seed, sleep)

    class Handler(_Handler):
        of = proxy
        upstream = server

    listener = _Listener((host, 0), Handler)
    proxy.port = listener.server_address[1]
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that go away are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: S3Proxy
    upstream: int

    def do_GET(self) -> None:
        body = self._body()
        harm = self.of.choose(self.command, self.path)
        do = harm.do if harm else None
        if harm is not None and do is Do.DELAY:
            self.of.sleep(harm.seconds)
        if do is Do.REFUSE:
            self._hang_up()
            return
        if do in _REFUSALS:
            self._fail(do)
            return
        if do is Do.FLIP_REQUEST:
            body = self.of.flipped(body)
        earlier = self.of.lists.get(self.path) if do is Do.STALE else None
        status, headers, answer = earlier or self._pass_on(body, strip=do is Do.STRIP)
        if LISTS in self.path and do is not Do.STALE:
            self.of.lists[self.path] = status, headers, answer
        if do is Do.REPEAT:
            status, headers, answer = self._pass_on(body)
        match do:
            case Do.UNANSWERED:
                self._hang_up()
            case Do.ERROR_AFTER:
                self._fail(Do.ERROR)
            case Do.FLIP_ANSWER:
                self._answer(status, headers, self.of.flipped(answer))
            case Do.TRUNCATE:
                self._answer(status, headers, answer, cut=True)
            case _:
                self._answer(status, headers, answer)

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 (http.server's names)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        whole = bytearray()
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers
        return bytes(whole)

    def _pass_on(self, body: bytes, *, strip: bool = False) -> Answer:
        connection = http.client.HTTPConnection(LOOPBACK, self.upstream, timeout=60)
        try:
            out = (*_HOP, *_CONDITIONS) if strip else _HOP
            headers = {name: value for name, value in self.headers.items() if name.lower() not in out}
            connection.request(self.command, self.path, body=body, headers=headers | {"Content-Length": str(len(body))})
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        given = {name.lower(): value for name, value in headers}
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        # HEAD says how long the body would be.
        self.send_header("Content-Length", given.get("content-length", "0") if not body else str(len(body)))
        self.end_headers()
        if cut:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self._hang_up()
        elif self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, do: Do) -> None:
        status, code = _REFUSALS[do]
        body = f"<Error><Code>{code}</Code><Message>of the proxy</Message></Error>".encode()
        self._answer(status, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else body)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""
