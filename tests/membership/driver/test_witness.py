"""A refused connection is a death only if a second neighbour finds the same: no node dies on one node's word."""

from __future__ import annotations

import queue
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elastic3d.etcd_server.certificates import Certificates
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.messages import MOST_TAKEN, SHAPE, Answer, Ask, Garbled, Message, Messages
from elastic3d.membership.driver.witness import (
    ASKED,
    FRESH,
    MOST_WAITING,
    TRIED,
    Conclusion,
    Inquiries,
    Tries,
    TryResult,
)
from elastic3d.trust.channel import dial
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import Encryption, load
from elastic3d.trust.frames import Forged, Seals
from elastic3d.trust.handshake import Keys, PortRole
from elastic3d.trust.stream import Stream
from tests.membership.driver.test_links import SECRET, Child, Told, Watcher, at, silent

KEYS = Keys(send=bytes(32), receive=bytes(32))


# The rules.


def test_the_conclusion_follows_from_the_answers() -> None:
    """One refusal is enough for a death; reached by all who know is a life; without an answer it is neither."""
    asks: Inquiries[str] = Inquiries()

    def after(*said: tuple[str, TryResult], at: float = 0.0) -> list[tuple[Conclusion, str | None]]:
        number = asks.begin("c@1", "refuses", ("b", "d"), 0.0)
        for by, verdict in said:
            asks.answered(by, number, verdict)
        conclusions = [(conclusion, witness) for _, _, conclusion, witness in asks.concluded(at)]
        assert ("c@1" in asks) is (not conclusions)
        return conclusions

    reached, refused, unknown = TryResult.REACHED, TryResult.REFUSED, TryResult.UNKNOWN
    assert after(("b", refused)) == [(Conclusion.DEAD, "b")]
    assert after(("b", reached), ("d", refused)) == [(Conclusion.DEAD, "d")]
    assert after(("b", reached), ("d", reached)) == [(Conclusion.LIVES, None)]
    assert after(("b", reached), ("d", unknown)) == [(Conclusion.LIVES, None)]
    assert after(("b", reached)) == []
    assert after(("b", reached), at=ASKED) == [(Conclusion.LIVES, None)]
    assert after(("b", unknown), ("d", unknown)) == [(Conclusion.UNWITNESSED, None)]
    assert after() == []
    assert after(at=ASKED) == [(Conclusion.UNWITNESSED, None)]
    assert after(("x", refused)) == [], "a member that was not asked has no answer"


def test_an_answer_to_another_question_counts_for_nothing() -> None:
    """Answers that are old or about somebody else do not count; a lost connection answers nothing."""
    asks: Inquiries[str] = Inquiries()
    old = asks.begin("c@1", "refuses", ("b",), 0.0)
    new = asks.begin("c@1", "refuses", ("b",), 1.0)
    asks.answered("b", old, TryResult.REFUSED)
    assert asks.concluded(1.0) == []
    asks.lost("b")
    assert asks.concluded(1.0) == [("c@1", "refuses", Conclusion.UNWITNESSED, None)]
    asks.answered("b", new, TryResult.REFUSED)
    assert asks.concluded(9.0) == []


def test_one_try_answers_all_who_ask() -> None:
    """One at a time per id, for a bounded number of askers and time; recent news need no new try."""
    tries: Tries[str] = Tries()
    assert tries.asked("c@1", "a", 1, 0.0) == (None, True)
    assert tries.asked("c@1", "b", 7, 0.1) == (None, False)
    assert tries.asked("d@1", "b", 8, 0.1) == (None, True)
    tries.lost("b")
    assert tries.conclude("c@1", TryResult.REFUSED, 0.2) == [("a", 1)]
    assert tries.asked("c@1", "b", 9, 0.2 + FRESH / 2) == (TryResult.REFUSED, False)
    assert tries.asked("c@1", "b", 9, 0.2 + 2 * FRESH) == (None, True)
    assert tries.overdue(0.1 + TRIED) == ["d@1"]
    for at_once in range(MOST_WAITING - 1):
        assert tries.asked("c@1", f"more{at_once}", 1, 0.4) == (None, False)
    assert tries.asked("c@1", "one too many", 1, 0.4) == (TryResult.UNKNOWN, False)


# Messages of the connection.


class Pair:
    """Both ends of one message stream."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.stream = Stream(self.near, None, answers=False)
        self.ours, self.theirs = Messages(KEYS, b""), Messages(KEYS, b"")

    def arrived(self) -> bytes:
        return self.far.recv(65536)

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_messages_survive_any_fragmentation(pair: Pair) -> None:
    """Byte by byte, with beats between questions and answers; each is read once."""
    ask, answer = Ask(number=7, id="n\u00f8de@1\udc80"), Answer(number=7, verdict=TryResult.REFUSED)
    assert pair.ours.beat(pair.stream)
    assert pair.ours.say(pair.stream, ask)
    assert pair.ours.say(pair.stream, answer)
    assert pair.ours.beat(pair.stream)
    heard = [pair.theirs.take(bytes([byte])) for byte in pair.arrived()]
    assert heard.count(True) == 4
    assert pair.theirs.taken() == [ask, answer]
    assert pair.theirs.taken() == []


def test_a_replayed_message_is_rejected(pair: Pair) -> None:
    """A recorded question cannot be asked again."""
    assert pair.ours.say(pair.stream, Ask(number=1, id="c@1"))
    said = pair.arrived()
    assert pair.theirs.take(said)
    with pytest.raises(Forged):
        pair.theirs.take(said)


@pytest.mark.parametrize(
    "message",
    [b"\x03\x00\x00", b"\x00\x00\x01x", b"\x01\x00\x04\0\0\0\0", b"\x02\x00\x05\0\0\0\0\x09", b"\x02\x00\x01\0"],
)
def test_a_malformed_message_is_rejected(message: bytes) -> None:
    """An unknown kind, a beat with a body, a question about nobody, an invalid answer."""
    theirs = Messages(KEYS, b"")
    with pytest.raises(Garbled, match="is no message"):
        theirs.take(message + Seals(KEYS.send, SHAPE.seal_bytes).next(message))


def test_no_memory_is_reserved_for_an_announced_length() -> None:
    """Too long a message is an error at once; more questions than anybody has are dropped."""
    with pytest.raises(Garbled):
        Messages(KEYS, b"").take(b"\x01\xff\xff")
    theirs, seals = Messages(KEYS, b""), Seals(KEYS.send, SHAPE.seal_bytes)
    message = b"\x01\x00\x05\0\0\0\1c"
    assert theirs.take(b"".join(message + seals.next(message) for _ in range(10 * MOST_TAKEN)))
    assert len(theirs.taken()) == MOST_TAKEN


# Real sockets.


class Ring:
    """Links of a, b and c, each a neighbour of each."""

    def __init__(self, encryption: Encryption | None = None) -> None:
        self.all = {name: Watcher(name, encryption=encryption) for name in "abc"}

    def __getitem__(self, name: str) -> Watcher:
        return self.all[name]

    def watch(self, name: str, **instead: acts.RingPeer) -> None:
        """Let one watch the others, some of them at another address than their own."""
        peers = [instead.get(other, one.peer(f"{other}@1")) for other, one in self.all.items() if other != name]
        self.all[name].links.watch(
            acts.WatchPeers(peers=tuple(peers), expected=tuple(peer.id for peer in peers), near=tuple(peers))
        )

    def meet(self) -> None:
        """Let all hear each other."""
        for name in self.all:
            self.watch(name)
        for name, one in self.all.items():
            hears = {one.next(30).id for _ in range(2)}
            assert hears == {f"{other}@1" for other in self.all if other != name}

    def close(self) -> None:
        for one in self.all.values():
            one.links.close()


@pytest.fixture(params=["plain", "encrypted"])
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    """Three that hear each other."""
    encryption = None
    if request.param == "encrypted":
        certificates: Certificates = request.getfixturevalue("certificates")
        encryption = load(str(certificates.client), str(certificates.client_key))
    ring = Ring(encryption)
    ring.meet()
    yield ring
    ring.close()


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Links that are closed afterwards."""
    watcher = Watcher()
    yield watcher
    watcher.links.close()


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that refuses: bound, but nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def refused(event: Told) -> bool:
    return isinstance(event, e.PeerRefused)


def deaths(one: Watcher, seconds: float) -> list[Told]:
    """Return the deaths reported to this one within a time."""
    events, end = [], time.monotonic() + seconds
    while True:
        try:
            events.append(one.wait_for(refused, max(0.0, end - time.monotonic())))
        except queue.Empty:
            return events


def test_a_living_node_survives_one_refusal(ring: Ring, closed: int) -> None:
    """Something else refuses a in place of c: b reaches c, and a tells people where to look, once."""
    ring.watch("a", c=at(closed, "c@1"))
    said = ring["a"].refused.get(timeout=30)
    assert said.peer == f"127.0.0.1:{closed}"
    assert "but other nodes reach c@1 there: is there a firewall" in said.reason
    assert deaths(ring["a"], 2.5) == []
    assert ring["a"].refused.empty()
    assert deaths(ring["b"], 0) == deaths(ring["c"], 0) == []


def test_a_dead_node_is_reported_with_both_witnesses(ring: Ring) -> None:
    """Both that dialled it ask each other, and both report it."""
    ring["c"].links.close()
    for one, other in ("ab", "ba"):
        death = ring[one].wait_for(refused, 30)
        assert isinstance(death, e.PeerRefused)
        assert death.id == "c@1"
        assert death.evidence.endswith(f"refuses the heartbeat connection, and {other} found the same")


def test_a_lone_survivor_does_not_wait_for_a_witness(ring: Ring) -> None:
    """Both others died together: there is nobody to ask, and nobody who would evict this one instead."""
    ring["b"].links.close()
    ring["c"].links.close()
    dead = {ring["a"].wait_for(refused, 30).id}
    while len(dead) < 2:
        dead.add(ring["a"].wait_for(refused, 30).id)


def test_a_new_incarnation_is_the_death_of_the_old_for_both(ring: Ring) -> None:
    """Another one answers at the port: the witness finds the same name there."""
    ring["c"].links.speak_for("c@2")
    death = ring["a"].wait_for(refused, 30)
    assert isinstance(death, e.PeerRefused)
    assert death.evidence.endswith("answers as 'c@2', not as c@1, and b found the same")


def test_another_program_at_the_port_is_a_death(ring: Ring) -> None:
    """The process is dead, and an unrelated one listens in its place."""
    port = ring["c"].links.port
    ring["c"].links.close()
    with socket.create_server(("127.0.0.1", port)) as foreign:
        foreign.settimeout(0.05)
        event: Told | None = None
        end = time.monotonic() + 30
        while event is None and time.monotonic() < end:
            try:
                connection, _ = foreign.accept()
            except TimeoutError:
                pass
            else:
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            try:
                event = ring["a"].wait_for(refused, 0.01)
            except queue.Empty:
                pass
    assert isinstance(event, e.PeerRefused)
    assert event.evidence.endswith("and b found the same")


@pytest.fixture
def trio() -> Iterator[tuple[Watcher, Child, Watcher]]:
    """a and c here, b in a process of its own; a and b watch the others."""
    with ExitStack() as stack:
        a, c, b = Watcher("a"), Watcher("c"), Child("b@1")
        for close in (a.links.close, c.links.close, b.close):
            stack.callback(close)
        b.watch_all(a.peer("a@1"), c.peer("c@1"))
        a.watch(b.peer, c.peer("c@1"))
        assert {a.next(30).id, a.next(30).id} == {"b@1", "c@1"}
        yield a, b, c


def test_a_silent_neighbour_is_no_witness(trio: tuple[Watcher, Child, Watcher], closed: int) -> None:
    """The neighbour asked is stopped: c counts as silent, which is asked about elsewhere; then b resumes."""
    a, b, c = trio
    b.signal(signal.SIGSTOP)
    c.links.close()
    assert a.wait_for(lambda death: death == silent("c@1"), 30)
    assert "no other neighbour could tell: c@1 counts as silent" in a.refused.get(timeout=30).reason
    assert deaths(a, 0.5) == []
    b.signal(signal.SIGCONT)
    death = a.wait_for(refused, 30)
    assert isinstance(death, e.PeerRefused)
    assert death.evidence.endswith("and b found the same")


def test_only_neighbours_are_tried(watcher: Watcher) -> None:
    """A member that asks about others learns nothing; nor does one that is no neighbour itself."""
    other = Watcher("c")
    try:
        watcher.watch(other.peer("c@1"), expected=("b@1",))
        for me, asked in (("b@1", "x@1"), ("x@1", "c@1")):
            with socket.create_connection(("127.0.0.1", watcher.links.port), timeout=30) as connection:
                channel = dial(connection, Credentials(secret=SECRET, id=me), PortRole.LINK, meant="a@1")
                keys = channel.peer.keys
                theirs = Messages(keys, channel.peer.rest)
                message = b"\x01\x00\x07\0\0\0\x05" + asked.encode()
                connection.sendall(message + Seals(keys.send, SHAPE.seal_bytes).next(message))
                answers: list[Message] = []
                while not answers:
                    theirs.take(connection.recv(1024))
                    answers = theirs.taken()
                assert answers == [Answer(number=5, verdict=TryResult.UNKNOWN)]
    finally:
        other.links.close()
