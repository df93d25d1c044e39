"""What the proxy before an object store does to requests, before a server that counts what it is asked."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from chaos.servers.s3_proxy import LISTS, Do, Harm, S3Proxy, s3_proxy

LIST = f"/bucket?{LISTS}2&prefix=packs"


class Counting(BaseHTTPRequestHandler):
    """Answers every request with how many there have been."""

    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = str(type(self).asked).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET  # noqa: N815 (http.server's name)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def proxy() -> Iterator[S3Proxy]:
    Counting.asked = 0
    server = HTTPServer(("127.0.0.1", 0), Counting)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    with s3_proxy(server.server_address[1]) as proxy:
        yield proxy
    server.shutdown()
    server.server_close()
    thread.join()


def ask(proxy: S3Proxy, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_stale_list_is_that_of_before(proxy: S3Proxy) -> None:
    """Of the same list; one that nobody has asked for before, and all else, is as it is."""
    assert ask(proxy, "GET", LIST) == (200, b"1")
    proxy.harms.append(Harm(do=Do.STALE, method="GET", path=LISTS, times=2))
    assert ask(proxy, "GET", "/bucket/key") == (200, b"2")
    assert ask(proxy, "GET", LIST) == (200, b"1")
    assert ask(proxy, "GET", f"{LIST}/other") == (200, b"3")
    assert ask(proxy, "GET", LIST) == (200, b"4")


def test_a_full_store_refuses_writes_and_never_hears_of_them(proxy: S3Proxy) -> None:
    """With the status and the code that servers have for it; reads pass."""
    proxy.harms.append(Harm(do=Do.FULL, method="PUT"))
    assert ask(proxy, "GET", "/bucket/key") == (200, b"1")
    status, body = ask(proxy, "PUT", "/bucket/key")
    assert (status, b"<Code>InsufficientStorage</Code>" in body) == (507, True)
    assert ask(proxy, "PUT", "/bucket/key") == (200, b"2")
