"""Two doctors on one machine, and what else may stand behind a port; over real sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from chaos.machine.processes import wait_until
from elastic3d.doctor import peers
from elastic3d.doctor.findings import FindingStatus, worst
from elastic3d.doctor.peers import PeerAddress, PeerListener, Versions
from elastic3d.doctor.running import Stopped
from elastic3d.errors import UsageError
from tests.doctor.looks import under_way

HERE = Versions(elastic3d="0.1.0", torch="2.13.0")


@pytest.fixture
def listener() -> Iterator[PeerListener]:
    listener = PeerListener(0, HERE)
    yield listener
    listener.close()


def call(port: int, here: Versions = HERE, host: str = "127.0.0.1") -> peers.PeerFacts:
    return peers.measure(PeerAddress(host=host, port=port), under_way(), here, "1d", wait=0.0)


@contextlib.contextmanager
def somebody(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve every connection to a port in a way of the test's own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(30)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_two_doctors_try_ports_both_ways(listener: PeerListener, host: str) -> None:
    """They hear of each other, over IPv4 and IPv6."""
    facts = call(listener.port, host=host)
    assert (facts.forth, facts.back) == ((peers.PORTS, peers.PORTS), (peers.PORTS, peers.PORTS))
    assert (facts.versions, facts.host) == (HERE, socket.gethostname())
    assert facts.seen_as == facts.ours == host
    assert facts.clock is not None
    assert abs(facts.clock.offset) <= facts.clock.within
    # It is noted once the answer is sent.
    assert wait_until(lambda: listener.callers == {"1d": host}, 30)
    assert facts.connect > 0
    at_leisure = replace(facts, connect=0.0)  # a busy machine may be slow to connect, and would be warned of
    assert worst(peers.judge(at_leisure, HERE)) is FindingStatus.OK


def test_another_version_is_told(listener: PeerListener) -> None:
    """By both that call."""
    other = replace(HERE, torch="2.12.0")
    assert worst(peers.judge(call(listener.port, other), other)) is FindingStatus.FAILURE


def test_a_port_that_is_taken_is_a_wrong_call(listener: PeerListener) -> None:
    """Told at once."""
    with pytest.raises(UsageError, match=f"--listen {listener.port}: Address already in use"):
        PeerListener(listener.port, HERE)


def test_a_peer_that_listens_later_is_waited_for() -> None:
    """Nodes that a scheduler starts together are not all there at once."""
    with socket.socket() as held:
        # Nobody else is given the port meanwhile, and who listens there later may share it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        answers: list[peers.PeerFacts] = []
        peer = PeerAddress(host="127.0.0.1", port=port)
        run = under_way()
        thread = threading.Thread(target=lambda: answers.append(peers.measure(peer, run, HERE, "1d", wait=60)))
        thread.start()
        assert wait_until(lambda: bool(run.doing), 60)
        late = PeerListener(port, HERE)
    thread.join(60)
    late.close()
    assert answers[0].doctor


def test_who_answers_in_another_way_is_no_doctor() -> None:
    """A web server, an ssh daemon, somebody who hangs up, or who sends garbage for ever."""
    for said in (b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"", b"[" * 5000, b'"doctor"\n', b"{}\n"):
        with somebody(lambda connection, said=said: connection.sendall(said)) as port:  # type: ignore[misc]
            facts = call(port)
        assert (facts.doctor, facts.error, facts.refused) == (False, "", False), said


def test_a_lying_doctor_moves_nothing() -> None:
    """Its numbers are bounded, its ports are looked at, its texts can be shown."""
    lie = {
        "doctor": 1,
        "host": "x\x1b[2J" + "y" * 500,
        "torch": ["2"],
        "elastic3d": None,
        "ports": [22, -1, 70000, "9", 1 << 40],
        "reached": 10**9,
        "seen": 7,
        "clock": "now",
    }

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(json.dumps(lie).encode() + b"\n")

    with somebody(answer) as port:
        facts = call(port)
    assert facts.host == "x[2J" + "y" * 123
    assert (facts.forth, facts.back, facts.clock) == ((0, 0), (3, 3), None)
    assert facts.versions == Versions(elastic3d="", torch="")
    assert worst(peers.judge(facts, HERE)) is FindingStatus.FAILURE


def test_a_listener_answers_no_strangers(listener: PeerListener) -> None:
    """And is there for the next caller; it connects to no port that needs privilege."""
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\n", b"[1]\n", b'{"doctor": 2}\n', b"x" * 10_000):
        with socket.create_connection(("127.0.0.1", listener.port), timeout=30) as connection:
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert listener.callers == {}
    with socket.create_connection(("127.0.0.1", listener.port), timeout=30) as connection:
        connection.sendall(b'{"doctor": 1, "id": "a", "ports": [22, 80, 1023]}\n')
        answer = json.loads(connection.makefile().readline())
    assert (answer["reached"], answer["seen"]) == (0, "127.0.0.1")
    assert call(listener.port).doctor


def test_a_doctor_that_is_busy_is_one_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many nodes as a scheduler starts call at once; who has to wait is not told that no doctor listens there."""
    monkeypatch.setattr(peers, "AT_ONCE", 1)
    busy = PeerListener(0, HERE)
    try:
        with socket.create_connection(("127.0.0.1", busy.port), timeout=30) as other:
            other.sendall(b'{"doctor": 1, "id": "a", "ports": []}\n')
            assert other.recv(1)
            timer = threading.Timer(0.5, other.shutdown, [socket.SHUT_RDWR])
            timer.start()
            assert call(busy.port).doctor
            timer.join()
    finally:
        busy.close()


def test_nobody_there_is_told_from_nobody_listening(refusing_port: Callable[[], int]) -> None:
    """Each has its own remedy."""
    assert call(refusing_port()).refused
    assert call(1, host="no-such-host.invalid").error


def test_who_gives_up_does_not_wait_for_a_peer() -> None:
    """A check that is stopped ends."""
    run = under_way()
    run.stop()
    with pytest.raises(Stopped):
        peers.measure(PeerAddress(host="127.0.0.1", port=1), run, HERE, "1d", wait=600)
