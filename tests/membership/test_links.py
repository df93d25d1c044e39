"""Heartbeat links over real sockets: refused is a death, silence is not."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from elastic3d.membership import events as e
from elastic3d.membership.links import Links, Peer

Told = e.PeerHeard | e.PeerRefused

CHILD = """\
import sys
from elastic3d.membership.links import Links
print(Links("127.0.0.1", lambda event: None).port, flush=True)
sys.stdin.read()
"""


class Watcher:
    """Links that keep what they are told."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.links = Links(address, self.told.put)

    def next(self, seconds: float) -> Told:
        return self.told.get(timeout=seconds)

    def wait_for(self, wanted: Callable[[Told], bool], seconds: float) -> Told:
        """Return the first news that is wanted; queue.Empty if it does not come in time."""
        end = time.monotonic() + seconds
        while True:
            news = self.told.get(timeout=max(0.0, end - time.monotonic()))
            if wanted(news):
                return news

    def nothing_for(self, seconds: float) -> None:
        with pytest.raises(queue.Empty):
            raise AssertionError(self.told.get(timeout=seconds))


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """One that is closed afterwards."""
    watcher = Watcher()
    yield watcher
    watcher.links.close()


def peer(name: str, port: int, address: str = "127.0.0.1") -> Peer:
    return (name, f"{name}1", address, port)


def heard(name: str, alive: bool) -> e.PeerHeard:
    return e.PeerHeard(name=name, incarnation=f"{name}1", alive=alive)


def test_a_peer_that_closes_is_refused_at_once(watcher: Watcher) -> None:
    """Its end is told within half a second of it, with the evidence; while it lived only its life was told."""
    other = Watcher()
    watcher.links.watch((peer("b", other.links.port),))
    assert watcher.next(2) == heard("b", True)
    watcher.nothing_for(0.6)
    other.links.close()
    news = watcher.next(0.5)
    assert isinstance(news, e.PeerRefused)
    assert (news.name, news.incarnation) == ("b", "b1")
    assert f"127.0.0.1:{other.links.port} refuses" in news.evidence


def test_nobody_there_from_the_start_is_refused(watcher: Watcher) -> None:
    """A port that nobody holds is a death too: the peer died before it was watched."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    watcher.links.watch((peer("b", port),))
    assert isinstance(watcher.next(0.5), e.PeerRefused)


def test_end_of_file_alone_is_no_death(watcher: Watcher) -> None:
    """A connection that is cut while the peer still listens is dialled again, and nothing is told."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        watcher.links.watch((peer("b", listener.getsockname()[1]),))
        for _cut in range(3):
            listener.settimeout(2)
            connection, _ = listener.accept()
            connection.settimeout(2)
            connection.send(connection.recv(1))
            connection.close()
        assert watcher.next(1) == heard("b", True)
        watcher.nothing_for(0.3)
    finally:
        listener.close()


def test_a_stopped_peer_falls_silent_and_is_heard_again() -> None:
    """SIGSTOP ends the veto after 1.5 s and is never taken for a death; after SIGCONT the peer is heard again."""
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        watcher = Watcher()
        try:
            assert child.stdout is not None
            watcher.links.watch((peer("b", int(child.stdout.readline())),))
            assert watcher.next(5) == heard("b", True)
            os.kill(child.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            assert watcher.next(4) == heard("b", False)
            assert 1.0 < time.monotonic() - stopped < 3.0
            watcher.nothing_for(4.0)
            os.kill(child.pid, signal.SIGCONT)
            assert watcher.next(2.5) == heard("b", True)
            watcher.nothing_for(2.0)
            os.kill(child.pid, signal.SIGKILL)
            assert isinstance(watcher.next(1), e.PeerRefused)
        finally:
            watcher.links.close()
            child.kill()


def test_a_mended_path_is_heard_without_waiting_for_tcp(watcher: Watcher) -> None:
    """A peer whose old connection stays dead, but who answers a new one, is heard again soon."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(4)
    try:
        watcher.links.watch((peer("b", listener.getsockname()[1]),))
        mute, _ = listener.accept()
        connection, _ = listener.accept()
        connection.settimeout(2)
        connection.send(connection.recv(1))
        assert watcher.next(1) == heard("b", True)
        mute.close()
        connection.close()
    finally:
        listener.close()


def test_who_is_watched_can_change(watcher: Watcher) -> None:
    """A peer no longer watched is no news when it ends; one watched again is told again though its link never fell."""
    b, c = Watcher(), Watcher()
    try:
        both = (peer("b", b.links.port), peer("c", c.links.port))
        watcher.links.watch(both)
        assert {watcher.next(2), watcher.next(2)} == {heard("b", True), heard("c", True)}
        watcher.links.watch(both)
        assert {watcher.next(2), watcher.next(2)} == {heard("b", True), heard("c", True)}
        watcher.links.watch(both[:1])
        assert watcher.next(2) == heard("b", True)
        c.links.close()
        watcher.nothing_for(0.5)
    finally:
        b.links.close()
        c.links.close()


@pytest.mark.parametrize("address", ["no.such.host.invalid", "", "\x00", "999.1.1.1", "fe80::1%nothing"])
@pytest.mark.parametrize("port", [1, 99999, -1])
def test_a_record_that_makes_no_sense_harms_nobody(watcher: Watcher, address: str, port: int) -> None:
    """One peer's unusable address does not keep the others from being heard."""
    good = Watcher()
    try:
        watcher.links.watch((peer("x", port, address), peer("b", good.links.port)))
        assert watcher.wait_for(lambda news: news.name == "b", 3) == heard("b", True)
    finally:
        good.links.close()


def test_ipv6() -> None:
    """Listening and watching work on an IPv6 address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 on this machine")
    one, other = Watcher("::1"), Watcher("::1")
    try:
        one.links.watch((peer("b", other.links.port, "::1"),))
        assert one.next(2) == heard("b", True)
    finally:
        one.links.close()
        other.links.close()


def test_close_leaves_no_thread_and_no_socket() -> None:
    """Links can be opened and closed for ever."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    for _time in range(3):
        one, other = Watcher(), Watcher()
        one.links.watch((peer("b", other.links.port),))
        assert one.next(2) == heard("b", True)
        one.links.close()
        other.links.close()
        one.links.close()
    assert open_files() == before
