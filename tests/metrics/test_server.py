"""A port that strangers may reach: it answers scrapes, and nothing that a caller does costs the keeper much."""

from __future__ import annotations

import http.client
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from chaos.machine.processes import wait_until
from elastic3d.errors import ConfigurationError
from elastic3d.metrics import server as port
from elastic3d.metrics.address import metrics_address
from elastic3d.metrics.server import MetricsServer
from elastic3d.threads import ThreadFailure
from elastic3d.trust.listening import Refusal

TEXT = ("a 1\n" * 5_000).encode()


class Served:
    """A server, and what it did."""

    def __init__(self, document: Callable[[str], tuple[bytes, str]] | None = None) -> None:
        self.made: list[str] = []
        self.failures: list[Exception] = []
        self.refusals: list[Refusal] = []
        self.server = serving(document or self._document, failed=self.failures.append, refused=self.refusals.append)
        host, _, number = self.server.address.rpartition(":")
        self.host, self.port = host, int(number)

    def _document(self, accept: str) -> tuple[bytes, str]:
        self.made.append(accept)
        return TEXT, "text/plain; version=0.0.4"

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=20)

    def ask(self, head: bytes) -> bytes:
        """Return all that is answered to bytes as they are."""
        with self.connect() as connection:
            connection.sendall(head)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)

    def get(self, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def serving(
    document: Callable[[str], tuple[bytes, str]],
    *,
    at: str = ":0",
    own: str = "127.0.0.1",
    failed: Callable[[Exception], None] = lambda error: None,
    refused: Callable[[Refusal], None] = lambda refusal: None,
) -> MetricsServer:
    """Return a server."""
    address = metrics_address(at)
    assert address is not None
    return MetricsServer(address, document, own=own, failed=failed, refused=refused)


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.close()


def test_metrics_are_at_one_path(served: Served) -> None:
    """HEAD has no body; other paths and methods say what there is."""
    assert served.get() == (200, TEXT)
    assert served.get("/metrics?x=1") == (200, TEXT)
    assert served.get(method="HEAD") == (200, b"")
    assert served.get("/") == (200, b"elastic3d: metrics are at /metrics\n")
    assert served.get("/other")[0] == 404
    assert served.get("/metrics/../x")[0] == 404
    assert served.get(method="POST")[0] == served.get(method="DELETE")[0] == 405


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\nAccept: " + b"q" * 8000, b"431"),
        (b"GET /metrics HTTP/1.0\nAccept: application/openmetrics-text;version=a.b.c;;,\n\n", b"200"),
    ],
)
def test_bytes_that_are_no_request_are_answered_and_forgotten(served: Served, head: bytes, code: bytes) -> None:
    """And the next caller is served."""
    if code == b"431":
        head += b"q" * 400
    assert served.ask(head).split(b" ")[1] == code
    assert served.get()[0] == 200
    assert not served.failures


def test_callers_at_the_same_time_share_a_document(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask; later ones get a new one."""
    monkeypatch.setattr(port, "FRESH", 600.0)
    for _ in range(20):
        assert served.get() == (200, TEXT)
    assert len(served.made) == 1
    monkeypatch.setattr(port, "FRESH", 0.0)
    assert served.get() == (200, TEXT)
    assert len(served.made) == 2


def test_callers_who_say_nothing_are_hung_up_on_and_keep_nobody_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some dribble byte by byte; more of them than there is room for push out themselves."""
    monkeypatch.setattr(port, "PATIENCE", 0.6)
    idle = [served.connect() for _ in range(3 * port.WAITING)]
    try:
        for one in idle[-4:]:
            one.sendall(b"GET /met")
        assert served.get()[0] == 200
        began = time.monotonic()
        for one in idle:
            try:
                assert one.recv(1) == b""
            except ConnectionResetError:
                pass
        assert time.monotonic() - began < 10
    finally:
        for one in idle:
            one.close()
    assert served.refusals[0].port == "metrics"
    assert len(served.refusals) == 1, "a flood is one event"
    assert served.get()[0] == 200


def test_a_caller_who_does_not_read_costs_its_own_connection() -> None:
    """The others are served meanwhile, a document that no socket's buffers hold."""
    large = bytes(20 << 20)
    served = Served(lambda accept: (large, "text/plain"))
    try:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((served.host, served.port))
            deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert served.get() == (200, large)
            assert wait_until(lambda: bool(served.refusals), 30)
            assert served.get() == (200, large)
    finally:
        served.server.close()


def test_a_flood_costs_little_processor_time(served: Served) -> None:
    """Callers beyond some in a second wait in the system."""
    stop = time.monotonic() + 1.5
    answers = []

    def flood() -> None:
        while time.monotonic() < stop:
            try:
                with socket.create_connection((served.host, served.port), timeout=1) as one:
                    one.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    answers.append(one.recv(16))
            except OSError:
                pass

    callers = [threading.Thread(target=flood) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert 10 < len(answers) <= 4 * port.MOST_SCRAPES
    assert served.get()[0] == 200


def test_a_failure_is_an_answer_and_a_count() -> None:
    """And the port goes on."""
    failing = [True]

    def document(accept: str) -> tuple[bytes, str]:
        if failing[0]:
            raise RuntimeError("nobody expects this")
        return b"fine 1\n", "text/plain"

    served = Served(document)
    try:
        assert served.get()[0] == 500
        assert [str(error) for error in served.failures] == ["nobody expects this"]
        failing[0] = False
        assert served.get() == (200, b"fine 1\n")
    finally:
        served.server.close()


def test_an_error_of_the_loop_itself_is_reported_and_the_port_goes_on(
    reported: queue.SimpleQueue[ThreadFailure], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like that of any other thread."""
    served = Served()
    try:
        monkeypatch.setattr(served.server, "_serve", None)
        with served.connect() as one:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            failure = reported.get(timeout=20)
            assert failure.thread == "elastic3d-metrics"
        monkeypatch.undo()
        assert served.get()[0] == 200
    finally:
        served.server.close()


def test_a_port_that_somebody_has_is_an_error_that_says_what_to_do(served: Served) -> None:
    """So is an address that this host does not have."""
    for at in (served.server.address, "192.0.2.1:0", "no-such-host.invalid:0"):
        with pytest.raises(ConfigurationError, match=r"metrics=.*nobody can listen.*port 0"):
            serving(lambda accept: (b"", ""), at=at)


def test_it_listens_where_it_is_told_and_nowhere_else(served: Served, refusing_port: Callable[[], int]) -> None:
    """The loopback address alone, or the node's own."""
    assert served.host == "127.0.0.1"
    number = refusing_port()
    other = serving(lambda accept: (b"", ""), at=f"node:{number}", own="127.0.0.2")
    try:
        assert other.address == f"127.0.0.2:{number}"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", number), timeout=5)
    finally:
        other.close()


def test_closing_ends_connections_and_gives_the_port_back(served: Served) -> None:
    """At once, whoever is connected; a second time does nothing."""
    with served.connect() as idle:
        began = time.monotonic()
        served.server.close()
        served.server.close()
        assert time.monotonic() - began < 5
        assert idle.recv(1) == b""
    serving(lambda accept: (b"", ""), at=served.server.address).close()
