"""Heartbeat links over real sockets: a refusal is a death, both ends report silence, and pauses accuse nobody."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic3d.etcd_server.certificates import Certificates
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver import neighbour
from elastic3d.membership.driver.links import SILENCE, Links
from elastic3d.membership.driver.messages import SHAPE
from elastic3d.membership.driver.neighbour import LONGEST, Neighbour
from elastic3d.trust.channel import answer, dial
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import Encryption, load
from elastic3d.trust.handshake import PortRole
from elastic3d.trust.listening import Refusal

Told = e.PeerHeard | e.PeerRefused
SECRET = "5e" * 32
B = Credentials(secret=SECRET, id="b@1")

CHILD = """\
import sys
from elastic3d.membership.actions import RingPeer, WatchPeers
from elastic3d.membership.driver.links import Links

links = Links("127.0.0.1", lambda event: print(event, flush=True), secret=sys.argv[2])
links.speak_for(sys.argv[1])
print(links.port, flush=True)
for line in sys.stdin:
    words = iter(line.split())
    peers = tuple(RingPeer(id=id, address="127.0.0.1", port=int(port)) for id, port in zip(words, words))
    links.watch(WatchPeers(peers=peers, expected=tuple(peer.id for peer in peers), near=peers))
"""
"""Links in another process, for the identity in its argument; each line on stdin says whom to watch and expect."""


class Watcher:
    """Links that keep their events."""

    def __init__(
        self,
        name: str = "a",
        address: str = "127.0.0.1",
        secret: str = SECRET,
        encryption: Encryption | None = None,
        silence: float = SILENCE,
    ) -> None:
        self.events: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self.refused: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
        self.links = Links(
            address, self.events.put, secret=secret, encryption=encryption, refused=self.refused.put, silence=silence
        )
        self.links.speak_for(f"{name}@1")
        self.address = address

    def peer(self, id: str) -> acts.RingPeer:
        """Return this one as a peer of that identity."""
        return acts.RingPeer(id=id, address=self.address, port=self.links.port)

    def watch(self, *peers: acts.RingPeer, expected: tuple[str, ...] = ()) -> None:
        self.links.watch(acts.WatchPeers(peers=peers, expected=expected))

    def next(self, seconds: float) -> Told:
        return self.events.get(timeout=seconds)

    def wait_for(self, wanted: Callable[[Told], bool], seconds: float) -> Told:
        """Return the first event that is wanted; queue.Empty if it does not come in time."""
        end = time.monotonic() + seconds
        while True:
            news = self.events.get(timeout=max(0.0, end - time.monotonic()))
            if wanted(news):
                return news

    def nothing_for(self, seconds: float) -> None:
        with pytest.raises(queue.Empty):
            raise AssertionError(self.events.get(timeout=seconds))


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Links that are closed afterwards."""
    watcher = Watcher()
    yield watcher
    watcher.links.close()


def at(port: int, id: str = "b@1", address: str = "127.0.0.1") -> acts.RingPeer:
    return acts.RingPeer(id=id, address=address, port=port)


def heard(id: str) -> e.PeerHeard:
    return e.PeerHeard(id=id, alive=True)


def silent(id: str) -> e.PeerHeard:
    return e.PeerHeard(id=id, alive=False)


class Child:
    """Links in a process of their own."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, id, SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(line.strip())

    @property
    def peer(self) -> acts.RingPeer:
        return at(self.port, self.id)

    def watch(self, id: str, port: int) -> None:
        self.watch_all(at(port, id))

    def watch_all(self, *peers: acts.RingPeer) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(f"{peer.id} {peer.port}" for peer in peers) + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    """Another process, ended afterwards."""
    child = Child("b@1")
    yield child
    child.close()


def test_a_closed_peer_is_reported_at_once(watcher: Watcher) -> None:
    """Within half a second of its end, with the evidence; while it lived only its life was reported."""
    other = Watcher("b")
    watcher.watch(other.peer("b@1"))
    assert watcher.next(2) == heard("b@1")
    watcher.nothing_for(0.6)
    other.links.close()
    news = watcher.next(0.5)
    assert isinstance(news, e.PeerRefused)
    assert news.id == "b@1"
    assert f"127.0.0.1:{other.links.port} refuses" in news.evidence


def test_of_two_a_refusal_is_no_death_of_one_that_is_heard(watcher: Watcher) -> None:
    """Something on the way refuses what this one dials; the other has dialled it, and lives while that stands."""
    other = Watcher("b")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        watcher.watch(expected=("b@1",))
        other.watch(watcher.peer("a@1"))
        assert watcher.next(2) == heard("b@1")
        watcher.watch(at(closed.getsockname()[1]), expected=("b@1",))
        assert watcher.next(2) == heard("b@1")
        watcher.nothing_for(1.5)
        other.links.close()
        assert isinstance(watcher.next(0.5), e.PeerRefused)


def test_a_peer_that_never_listened_is_reported_as_dead(watcher: Watcher) -> None:
    """It died before anybody watched it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        watcher.watch(at(held.getsockname()[1]))
        assert isinstance(watcher.next(0.5), e.PeerRefused)


def test_end_of_file_alone_is_no_death(watcher: Watcher) -> None:
    """A connection that is cut while the peer still listens is dialled again, and nothing is reported."""
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        watcher.watch(at(listener.getsockname()[1]))
        for _cut in range(3):
            listener.settimeout(2)
            connection, _ = listener.accept()
            reply = answer(connection, B, PortRole.LINK)
            assert (reply.peer.id, reply.peer.meant) == ("a@1", "b@1")
            connection.close()
        assert watcher.next(1) == heard("b@1")
        watcher.nothing_for(0.3)
    finally:
        listener.close()


def test_another_identity_at_the_port_is_a_death(watcher: Watcher) -> None:
    """A port taken over by another member, or by an unrelated program, counts as a closed port."""
    other = Watcher("c")
    foreign = socket.create_server(("127.0.0.1", 0))
    try:
        watcher.watch(other.peer("b@1"))
        news = watcher.next(1)
        assert isinstance(news, e.PeerRefused)
        assert "answers as 'c@1', not as b@1" in news.evidence
        watcher.watch(at(foreign.getsockname()[1], "d@1"))
        connection, _ = foreign.accept()
        connection.recv(100)
        connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        news = watcher.wait_for(lambda news: news.id == "d@1", 1)
        assert isinstance(news, e.PeerRefused)
        connection.close()
    finally:
        other.links.close()
        foreign.close()


def test_a_new_incarnation_is_served_over_the_same_links(watcher: Watcher) -> None:
    """Watchers of the old one are told of its death at once; the new one is heard, and watches nobody yet."""
    other = Watcher("b")
    try:
        watcher.watch(other.peer("b@1"))
        other.watch(watcher.peer("a@1"))
        assert watcher.next(2) == heard("b@1")
        assert other.next(2) == heard("a@1")
        other.links.speak_for("b@2")
        news = watcher.next(0.5)
        assert isinstance(news, e.PeerRefused)
        assert news.id == "b@1"
        watcher.watch(other.peer("b@2"))
        assert watcher.wait_for(lambda news: news.id == "b@2", 1) == heard("b@2")
        other.nothing_for(1.5)
    finally:
        other.links.close()


def test_an_expected_dialler_is_heard_and_missed(watcher: Watcher) -> None:
    """The dialled end listens too; a stranger's connection is served but not believed."""
    other, stranger = Watcher("b"), Watcher("x")
    try:
        watcher.watch(expected=("b@1", "c@1"))
        other.watch(watcher.peer("a@1"))
        stranger.watch(watcher.peer("a@1"))
        assert stranger.next(1) == heard("a@1")
        assert watcher.next(1) == heard("b@1")
        other.links.close()
        silences = [watcher.next(3.5), watcher.next(3.5)]
        assert silences == [silent("b@1"), silent("c@1")], "c was never heard: it gets the longer time"
        watcher.nothing_for(0.5)
    finally:
        other.links.close()
        stranger.links.close()


def test_both_ends_notice_a_stopped_process(watcher: Watcher, child: Child) -> None:
    """Both ends report a SIGSTOP as silence, never as a death; once resumed, the process accuses nobody.

    A stop of more than twice the silence limit gives the resumed process every reason to believe in its own.
    """
    third = Watcher("c")
    try:
        watcher.watch(child.peer)
        third.watch(expected=("b@1",))
        child.watch("c@1", third.links.port)
        assert watcher.next(5) == heard("b@1")
        assert third.next(5) == heard("b@1")
        child.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert watcher.next(4) == silent("b@1")
        assert third.next(4) == silent("b@1")
        assert 0.7 < time.monotonic() - stopped < 3.0
        watcher.nothing_for(2.0)
        child.signal(signal.SIGCONT)
        assert watcher.next(2.5) == heard("b@1")
        assert third.next(2.5) == heard("b@1")
        watcher.nothing_for(2.0)
        lines = [child.events.get_nowait() for _ in range(child.events.qsize())]
        assert lines == ["PeerHeard(id='c@1', alive=True)"]
        child.signal(signal.SIGKILL)
        assert isinstance(watcher.next(1), e.PeerRefused)
        assert third.next(2) == silent("b@1")
    finally:
        third.links.close()


def test_two_processes_stopped_together_accuse_nobody() -> None:
    """As when a whole machine is frozen: nothing arrived, and nobody had time to send anything."""
    one, other = Child("a@1"), Child("b@1")
    try:
        one.watch("b@1", other.port)
        other.watch("a@1", one.port)
        assert one.events.get(timeout=5) == "PeerHeard(id='b@1', alive=True)"
        assert other.events.get(timeout=5) == "PeerHeard(id='a@1', alive=True)"
        for both in (signal.SIGSTOP, signal.SIGCONT):
            one.signal(both)
            other.signal(both)
            time.sleep(2.5)
        assert one.events.empty()
        assert other.events.empty()
    finally:
        one.close()
        other.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watcher]:
    """Links that take all twice as long: a busy machine adds to the pauses of a test, too."""
    monkeypatch.setattr(neighbour, "LONGEST", 2 * LONGEST)
    watcher = Watcher(silence=2 * SILENCE)
    yield watcher
    watcher.links.close()


def test_short_pauses_are_not_silence(patient: Watcher, child: Child) -> None:
    """A process stopped for two thirds of the limit at a time, with a moment between, is heard all the time."""
    patient.watch(child.peer, expected=("b@1",))
    child.watch("a@1", patient.links.port)
    assert patient.next(5) == heard("b@1")
    for _pause in range(4):
        child.signal(signal.SIGSTOP)
        time.sleep(1.4)
        child.signal(signal.SIGCONT)
        time.sleep(0.5)
    assert patient.events.empty()


def test_a_slow_peer_is_given_more_time(patient: Watcher, child: Child) -> None:
    """On an overloaded host beats are late before they are very late: the worst gap so far sets the patience.

    Pauses of 1.4 s are no silence. After them 2.6 s is none either, although it would be for a prompt peer. A lasting
    one is still reported.
    """
    patient.watch(child.peer, expected=("b@1",))
    child.watch("a@1", patient.links.port)
    assert patient.next(5) == heard("b@1")
    time.sleep(1.0)
    for pause in (1.4, 2.6):
        child.signal(signal.SIGSTOP)
        time.sleep(pause)
        child.signal(signal.SIGCONT)
        time.sleep(0.6)
    assert patient.events.empty()
    child.signal(signal.SIGSTOP)
    assert patient.next(2 * LONGEST + 3) == silent("b@1")
    child.signal(signal.SIGCONT)


def test_the_worst_gap_of_late_sets_the_patience() -> None:
    """Never less than the limit of all, nor more than a lease; a gap of long ago counts no more."""
    one = Neighbour(silent_at=0.0, alive=True)
    patience = []
    now = 100.0
    for gap in (0.0, 0.2, 0.8, 1.5, 0.2):
        now += gap
        one.heard(now, SILENCE)
        patience.append(one.silent_at - now)
    assert patience == pytest.approx([SILENCE, SILENCE, 2.0, LONGEST, LONGEST])
    for _beat in range(1000):
        now += 0.2
        one.heard(now, SILENCE)
    assert one.silent_at - now == pytest.approx(SILENCE)


def test_a_restored_path_is_noticed_without_waiting_for_tcp(watcher: Watcher) -> None:
    """A peer whose old connection stays dead, but who answers a new one, is heard again soon."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(4)
    try:
        watcher.watch(at(listener.getsockname()[1]))
        mute, _ = listener.accept()
        connection, _ = listener.accept()
        answer(connection, B, PortRole.LINK)
        assert watcher.next(1) == heard("b@1")
        mute.close()
        connection.close()
    finally:
        listener.close()


def test_the_watched_peers_can_change(watcher: Watcher) -> None:
    """The end of a peer that is no longer watched is not reported.

    One watched again is, although its link never fell.
    """
    b, c = Watcher("b"), Watcher("c")
    try:
        both = (b.peer("b@1"), c.peer("c@1"))
        watcher.watch(*both)
        assert {watcher.next(2), watcher.next(2)} == {heard("b@1"), heard("c@1")}
        watcher.watch(*both)
        assert {watcher.next(2), watcher.next(2)} == {heard("b@1"), heard("c@1")}
        watcher.watch(*both[:1])
        assert watcher.next(2) == heard("b@1")
        c.links.close()
        watcher.nothing_for(0.5)
    finally:
        b.links.close()
        c.links.close()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b" \n", b"x" * 9000, b"[" * 4000 + b"\n", b"\xff \xff\n"]
)
def test_garbage_from_strangers_does_no_harm(watcher: Watcher, garbage: bytes) -> None:
    """A connection without a valid hello gets no service, and the loop goes on for the others."""
    other = Watcher("b")
    try:
        with socket.create_connection(("127.0.0.1", watcher.links.port)) as stranger:
            stranger.sendall(garbage)
            other.watch(watcher.peer("a@1"))
            assert other.next(2) == heard("a@1")
    finally:
        other.links.close()


@pytest.mark.parametrize("address", ["no.such.host.invalid", "", "\x00", "999.1.1.1", "fe80::1%nothing"])
@pytest.mark.parametrize("port", [1, 99999, -1])
def test_an_unusable_address_does_no_harm(watcher: Watcher, address: str, port: int) -> None:
    """The other peers are still heard."""
    good = Watcher("b")
    try:
        watcher.watch(at(port, "x@1", address), good.peer("b@1"))
        assert watcher.wait_for(lambda news: news.id == "b@1", 3) == heard("b@1")
    finally:
        good.links.close()


def test_links_work_over_ipv6() -> None:
    """Listening and watching work on an IPv6 address."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 on this machine")
    one, other = Watcher("a", "::1"), Watcher("b", "::1")
    try:
        one.watch(other.peer("b@1"))
        assert one.next(2) == heard("b@1")
    finally:
        one.links.close()
        other.links.close()


def test_close_leaves_no_thread_and_no_socket() -> None:
    """Links can be opened and closed any number of times."""

    def open_files() -> set[tuple[str, str]]:
        files = set()
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                files.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return files

    before = open_files()
    for _time in range(3):
        one, other = Watcher("a"), Watcher("b")
        one.watch(other.peer("b@1"), expected=("b@1",))
        assert one.next(2) == heard("b@1")
        one.links.close()
        other.links.close()
        one.links.close()
    # What this process had open before may be closed meanwhile, where the garbage of another test is collected.
    assert open_files() <= before


def test_an_order_given_while_another_is_read_is_obeyed(watcher: Watcher) -> None:
    """Nothing else wakes links that have no connection yet: they would watch nobody for ever."""
    other = Watcher("b")

    late = [acts.WatchPeers(peers=(other.peer("b@1"),), expected=())]

    class Orders(queue.SimpleQueue[acts.WatchPeers]):
        """The next order comes just after these were read as empty for the first time."""

        def get_nowait(self) -> acts.WatchPeers:
            try:
                return super().get_nowait()
            except queue.Empty:
                if late:
                    watcher.links.watch(late.pop())
                raise

    try:
        vars(watcher.links)["_orders"] = Orders()
        watcher.watch()
        assert watcher.next(30) == heard("b@1")
    finally:
        other.links.close()


def test_a_heartbeat_needs_the_secret(watcher: Watcher) -> None:
    """A forged one would keep a dead node alive for ever: its sender is disconnected and reported."""
    forger = Watcher("b", secret="a1" * 32)
    try:
        watcher.watch(expected=("b@1",))
        forger.watch(watcher.peer("a@1"))
        assert watcher.next(5) == silent("b@1")
        assert watcher.refused.get(timeout=5).peer == "127.0.0.1"
        assert "does not hold this run's secret" in forger.refused.get(timeout=5).reason
        assert all(isinstance(forger.events.get_nowait(), e.PeerHeard) for _ in range(forger.events.qsize()))
    finally:
        forger.links.close()


def test_a_peer_that_answers_without_the_secret_is_neither_alive_nor_dead(watcher: Watcher) -> None:
    """A man in the middle can make somebody silent, which others are asked about, but not dead."""
    impostor = Watcher("b", secret="a1" * 32)
    try:
        watcher.watch(impostor.peer("b@1"))
        assert watcher.next(30) == silent("b@1")
        assert "answers for b@1, but does not hold" in watcher.refused.get(timeout=30).reason
        watcher.nothing_for(1.5)
    finally:
        impostor.links.close()


def test_a_forged_beat_ends_the_connection(watcher: Watcher) -> None:
    """Beats count once, and only if their seals are right."""
    watcher.watch(expected=("b@1",))
    with socket.create_connection(("127.0.0.1", watcher.links.port), timeout=20) as connection:
        dial(connection, B, PortRole.LINK, meant="a@1")
        assert watcher.next(30) == heard("b@1")
        connection.sendall(bytes(SHAPE.head_bytes + SHAPE.seal_bytes))
        with contextlib.suppress(ConnectionError):
            while connection.recv(1024):
                pass
    assert "forged" in watcher.refused.get(timeout=30).reason


def test_a_flood_of_strangers_keeps_no_member_out(watcher: Watcher) -> None:
    """More silent connections than may be pending: a member is still heard, and they are closed."""
    other = Watcher("b")
    crowd = [socket.create_connection(("127.0.0.1", watcher.links.port), timeout=30) for _ in range(150)]
    try:
        watcher.watch(expected=("b@1",))
        other.watch(watcher.peer("a@1"))
        assert watcher.wait_for(lambda news: news == heard("b@1"), 10)
        for one in crowd:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
    finally:
        other.links.close()
        for one in crowd:
            one.close()


@pytest.fixture
def encryption(certificates: Certificates) -> Encryption:
    """The TLS context of a node with a client's certificate."""
    context = load(str(certificates.client), str(certificates.client_key))
    assert context is not None
    return context


def test_encrypted_links_report_the_same_as_plain_ones(encryption: Encryption) -> None:
    """Life at both ends, beats for longer than the first may take, a cut that is restored, and an end."""
    one, other = Watcher("a", encryption=encryption), Watcher("b", encryption=encryption)
    try:
        one.watch(other.peer("b@1"))
        other.watch(expected=("a@1",))
        assert one.next(30) == heard("b@1")
        assert other.next(30) == heard("a@1")
        one.nothing_for(1.5)
        assert other.events.empty()
        stranger = Watcher("c", secret="a1" * 32, encryption=encryption)
        stranger.watch(one.peer("a@1"))
        assert "does not hold this run's secret" in stranger.refused.get(timeout=30).reason
        assert one.refused.get(timeout=30).peer == "127.0.0.1"
        stranger.links.close()
        other.links.close()
        assert isinstance(one.wait_for(lambda news: isinstance(news, e.PeerRefused), 30), e.PeerRefused)
    finally:
        one.links.close()
        other.links.close()


@pytest.mark.parametrize("dials_encrypted", [True, False])
def test_peers_with_different_encryption_are_neither_alive_nor_dead(
    encryption: Encryption, dials_encrypted: bool
) -> None:
    """It is a mistake in one node's settings: both report it once, and nobody is evicted for it."""
    one = Watcher("a", encryption=encryption if dials_encrypted else None)
    other = Watcher("b", encryption=None if dials_encrypted else encryption)
    try:
        one.watch(other.peer("b@1"))
        assert one.next(30) == silent("b@1")
        ours, theirs = one.refused.get(timeout=30).reason, other.refused.get(timeout=30).reason
        assert ours.startswith("answers for b@1, but")
        for reason in (ours, theirs):
            assert "give cert= and key= to every node of the run, or to none" in reason
        if not dials_encrypted:
            assert "calls itself 'a@1'" in theirs
        one.nothing_for(1.0)
    finally:
        one.links.close()
        other.links.close()


def test_an_incomplete_tls_handshake_holds_up_nobody(encryption: Encryption) -> None:
    """Its peer is disconnected in time, and others are heard meanwhile."""
    one, other = Watcher("a", encryption=encryption), Watcher("b", encryption=encryption)
    crowd = [socket.create_connection(("127.0.0.1", one.links.port), timeout=30) for _ in range(20)]
    try:
        for stranger in crowd:
            stranger.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        other.watch(one.peer("a@1"))
        assert other.next(30) == heard("a@1")
        for stranger in crowd:
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        assert "did not prove itself" in one.refused.get(timeout=30).reason
    finally:
        one.links.close()
        other.links.close()
        for stranger in crowd:
            stranger.close()
