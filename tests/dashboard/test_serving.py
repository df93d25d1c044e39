"""The page over HTTP: who gets it, how it is kept up to date, and who is cut off."""

from __future__ import annotations

import gzip
import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from elastic3d.dashboard.serving import HEADERS, MOST_CONNECTIONS, MOST_ORDER
from elastic3d.errors import EtcdUnavailable, UsageError
from elastic3d.trust.listening import WAITING
from tests.dashboard.serving import VIEW, Served, Stream, ask, serving

TOKEN = "t0ken"
ORDER = json.dumps({"order": "drain", "node": "a"}).encode()


def own(served: Served) -> dict[str, str]:
    """Return the headers with which the page itself gives an order."""
    return {
        "content-type": "application/json",
        "origin": f"http://127.0.0.1:{served.port}",
        "authorization": f"Bearer {TOKEN}",
    }


def changed(**parts: str) -> dict[str, Any]:
    return {**VIEW, "parts": {**VIEW["parts"], **parts}}


def read_on(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass


def waiting(served: Served, number: int) -> None:
    deadline = time.monotonic() + 20
    while served.feed.watching != number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_token_becomes_a_cookie_that_other_sites_do_not_send() -> None:
    """And leaves the address; without it nothing is shown, not even which job it is."""
    with serving(token=TOKEN) as served:
        for path in ("/", "/stream", "/nowhere", "/?token=", "/?token=wrong"):
            response, body = served.get(path)
            assert response.status in (401, 403)
            assert b"gpt-1b" not in body
        response, _ = served.get(f"/?token={TOKEN}")
        cookie = response.headers["set-cookie"]
        assert (response.status, response.headers["location"]) == (303, "/")
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        response, body = served.get(cookie=cookie.partition(";")[0])
        assert response.status == 200
        assert b"gpt-1b: training" in body
        assert TOKEN.encode() not in body


def test_every_answer_has_the_headers_that_keep_others_out() -> None:
    """No cache, no frame, no guessing of types; the page's policy has a nonce that is new each time."""
    with serving() as served:
        nonces = set()
        for path, status in (("/", 200), ("/", 200), ("/orders", 405), ("/x", 404)):
            response, body = served.get(path)
            assert response.status == status
            for name in set(HEADERS) - {"content-security-policy"}:
                assert response.headers[name] == HEADERS[name]
            assert "default-src 'none'" in response.headers["content-security-policy"]
            if status == 200:
                (nonce,) = set(re.findall(rb'nonce="([^"]+)"', body))
                assert f"script-src 'nonce-{nonce.decode()}'" in response.headers["content-security-policy"]
                nonces.add(nonce)
        assert len(nonces) == 2


def test_a_foreign_name_that_points_here_is_refused() -> None:
    """DNS rebinding: the browser believes that this is evil.example.org."""
    with serving() as served:
        response, body = served.get(host=f"evil.example.org:{served.port}")
        assert response.status == 421
        assert b"--allow-host" in body


def test_a_stream_brings_the_view_and_then_what_changed() -> None:
    """To each browser the same; one that comes later gets everything at once."""
    with serving(alive=0.05) as served:
        early = Stream(served.port)
        assert early.next() == ("whole", VIEW)
        assert early.response.headers["content-type"].startswith("text/event-stream")
        served.feed.publish(changed(job="<b>two</b>"), 1001.0)
        while (kind := early.next())[0] == "alive":
            pass
        assert kind == ("change", {"parts": {"job": "<b>two</b>"}})
        late = Stream(served.port, compressed=True)
        assert late.response.headers["content-encoding"] == "gzip"
        assert late.next()[0] == "whole"
        for number in range(40):  # more than are kept, so that some are sent everything anew
            served.feed.publish(changed(job=f"<b>{number}</b>"), 1002.0)
        for stream in (early, late):
            stream.until(lambda state: state["parts"]["job"] == "<b>39</b>")
            assert stream.state == changed(job="<b>39</b>")
            stream.close()
        waiting(served, 0)


def test_nothing_is_sent_while_nothing_changes() -> None:
    """But word now and then that the page is alive."""
    with serving(alive=0.05) as served:
        stream = Stream(served.port)
        stream.next()
        assert not served.feed.publish(dict(VIEW), 1005.0)
        assert [stream.next() for _ in range(3)] == [("alive", {})] * 3
        stream.close()


def test_a_browser_that_does_not_read_is_cut_off() -> None:
    """Nobody waits for it: others are served meanwhile, and its connection ends."""
    with serving(patience=0.3, alive=0.05) as served, socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        waiting(served, 1)
        quick = Stream(served.port)
        waiting(served, 2)
        deadline, number = time.monotonic() + 20, 0
        while served.feed.watching > 1:
            assert time.monotonic() < deadline
            number += 1
            served.feed.publish(changed(job=f"{number}" * 200_000), 1000.0)
            quick.until(lambda state: state["parts"]["job"] == f"{number}" * 200_000)  # noqa: B023
        slow.settimeout(20)
        with pytest.raises(ConnectionResetError):
            read_on(slow)
        quick.close()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /orders HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 9\r\n\r\n{",
        b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nG",
    ],
    ids=["nothing", "half a request", "half an order", "half a second request"],
)
def test_callers_that_send_no_whole_request_shut_nobody_out(said: bytes) -> None:
    """The oldest of them are cut off; one that was not may still ask."""
    with serving(give=lambda wish: "") as served, ExitStack() as open_:
        callers = []
        for _ in range(MOST_CONNECTIONS + 12):
            caller = open_.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
            with suppress(ConnectionError):
                caller.sendall(said)
                if said.endswith(b"\r\n\r\nG"):
                    caller.recv(1 << 16)  # the answer to the first
            callers.append(caller)
        for _ in range(3):
            assert served.get()[0].status == 200
        for caller in callers[:-WAITING]:
            with suppress(ConnectionResetError):
                read_on(caller)
        if not said:
            callers[-1].sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert callers[-1].recv(12) == b"HTTP/1.1 200"


def test_only_so_many_browsers_may_follow() -> None:
    """The next one is told so, and may come when another has gone."""
    with serving(most_streams=2, alive=0.05) as served:
        streams = [Stream(served.port) for _ in range(2)]
        for stream in streams:
            stream.next()
        response, body = served.get("/stream")
        assert (response.status, response.headers["retry-after"]) == (503, "10")
        assert b"2 browsers follow this page already" in body
        assert served.get()[0].status == 200
        streams[0].close()
        waiting(served, 1)
        again = Stream(served.port)
        assert again.next()[0] == "whole"
        for stream in (again, streams[1]):
            stream.close()


def test_the_page_is_compressed_for_whom_it_can_be() -> None:
    """All browsers can."""
    with serving() as served:
        response, body = served.get(accept_encoding="br, gzip")
        assert response.headers["content-encoding"] == "gzip"
        assert b"gpt-1b" in gzip.decompress(body)
        assert served.get(accept_encoding="gzip;q=0")[0].headers["content-encoding"] is None


def test_orders_are_refused_unless_they_are_allowed() -> None:
    """Even those that the page itself would give."""
    with serving(token=TOKEN) as served:
        response, body = ask(served.port, "POST", "/orders", own(served), ORDER)
        assert response.status == 403
        assert b"--allow-orders" in body


def test_an_order_has_to_come_from_the_page_with_the_token() -> None:
    """Not from another site, not without an origin, not from a form, and it has to be one."""
    given: list[Any] = []

    def give(wish: dict[str, Any]) -> str:
        given.append(wish)
        if wish.get("node") == "gone":
            raise UsageError("there is no node 'gone' in this job")
        if wish.get("node") == "etcd":
            raise EtcdUnavailable("no endpoint answered")
        return "node a leaves within 5 min"

    with serving(token=TOKEN, give=give) as served:
        right = own(served)
        wrong: list[tuple[dict[str, str | None], int]] = [
            ({"authorization": None}, 401),
            ({"authorization": "Bearer no"}, 401),
            ({"origin": None}, 403),
            ({"origin": "http://evil.example.org"}, 403),
            ({"origin": "null"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"host": f"evil.example.org:{served.port}"}, 421),
            ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ]
        for change, status in wrong:
            headers = {name: value for name, value in {**right, **change}.items() if value is not None}
            assert ask(served.port, "POST", "/orders", headers, ORDER)[0].status == status, change
        for body in (b"", b"{", b"[]", b"\xff", b"[" * 5000):
            assert ask(served.port, "POST", "/orders", right, body)[0].status == 400, body
        assert ask(served.port, "POST", "/orders", right, b" " * (MOST_ORDER + 1))[0].status == 413
        assert given == []
        response, said = ask(served.port, "POST", "/orders", right, ORDER)
        assert (response.status, said) == (200, b"node a leaves within 5 min\n")
        assert given == [{"order": "drain", "node": "a"}]
        for node, status in (("gone", 400), ("etcd", 503)):
            response, said = ask(served.port, "POST", "/orders", right, json.dumps({"node": node}).encode())
            assert response.status == status
            assert said.count(b"\n") == 1
