"""Encrypted connections that never block: fragmented, spoken to in plaintext, or fed with garbage."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic3d.etcd_server.certificates import Certificates
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.encryption import Encryption, load
from elastic3d.trust.handshake import ALERT, Answering, Dialling, HandshakeRejected, PortRole
from elastic3d.trust.stream import ENCRYPTED_LIMIT, Stream

A, B = (Credentials(secret="5e" * 32, id=id) for id in ("a@1", "b@2"))


@pytest.fixture
def encryption(certificates: Certificates) -> Encryption:
    """The TLS context of a node with a client's certificate."""
    context = load(str(certificates.client), str(certificates.client_key))
    assert context is not None
    return context


class Wire:
    """A connection whose two ends the test holds; it passes as much as the test wants."""

    def __init__(self, encryption: Encryption | None, *, answers: bool) -> None:
        ours, self.far = socket.socketpair()
        ours.setblocking(False)
        self.far.setblocking(False)
        self.stream = Stream(ours, encryption, answers=answers)

    def out(self) -> bytes:
        """Take the sent bytes."""
        try:
            return self.far.recv(1 << 20)
        except BlockingIOError:
            return b""

    def put(self, data: bytes) -> bytes | None:
        """Deliver these bytes, and return what they decode to."""
        received = b""
        for start in range(0, len(data), 1024):
            self.far.send(data[start : start + 1024])
            while piece := self.stream.receive():
                received += piece
        return received or None

    def close(self) -> None:
        self.stream.hang_up()
        self.far.close()


@pytest.fixture
def wires() -> Iterator[Callable[..., Wire]]:
    """Make connections, closed afterwards."""
    made: list[Wire] = []

    def make(encryption: Encryption | None, *, answers: bool) -> Wire:
        made.append(Wire(encryption, answers=answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pump(one: Wire, other: Wire, cut: int = 1 << 20) -> tuple[bytes, bytes]:
    """Pass everything, `cut` bytes at a time; return the data that each end received."""
    received = [b"", b""]
    moved = True
    while moved:
        moved = False
        for at, (source, target) in enumerate(((other, one), (one, other))):
            assert source.stream.flush()
            data = source.out()
            moved = moved or bool(data)
            for start in range(0, len(data), cut):
                received[at] += target.put(data[start : start + cut]) or b""
    return received[0], received[1]


@pytest.mark.parametrize("cut", [1, 100, 1 << 20])
def test_data_survives_any_fragmentation(encryption: Encryption, wires: Callable[..., Wire], cut: int) -> None:
    """So does the handshake; both ends know the certificate shown, and nothing is readable on the wire."""
    dials, answers = wires(encryption, answers=False), wires(encryption, answers=True)
    assert dials.stream.begin()
    assert not dials.stream.agreed
    pump(dials, answers, cut)
    assert dials.stream.agreed
    assert answers.stream.agreed
    assert dials.stream.binding == answers.stream.binding == encryption.binding
    for one, other in ((dials, answers), (answers, dials)):
        one.stream.proved()
        other.stream.proved()
        assert one.stream.send(b"a beat")
        said = one.out()
        assert b"a beat" not in said
        assert b"".join(other.put(said[at : at + cut]) or b"" for at in range(0, len(said), cut)) == b"a beat"


def test_data_beyond_the_socket_buffer_waits(encryption: Encryption, wires: Callable[..., Wire]) -> None:
    """It arrives in order, encrypted or not, once somebody reads."""
    for how in (None, encryption):
        dials, answers = wires(how, answers=False), wires(how, answers=True)
        dials.stream.begin()
        pump(dials, answers)
        for one in (dials, answers):
            one.stream.proved()
        data = bytes(range(256)) * 4096
        assert dials.stream.send(data)
        assert dials.stream.send(b"end")
        assert dials.stream.unsent
        _, received = pump(dials, answers, 4096)
        assert received == data + b"end"
        assert not dials.stream.unsent


def test_a_plaintext_dialler_is_refused_and_told_why(encryption: Encryption, wires: Callable[..., Wire]) -> None:
    """A node without a certificate dials one that has one: both sides report what is wrong."""
    answers = wires(encryption, answers=True)
    dials = Dialling(A, PortRole.LINK)
    with pytest.raises(
        HandshakeRejected, match="calls itself 'a@1', and does not encrypt as this node does"
    ) as refused:
        answers.put(dials.hello)
    assert not refused.value.foreign
    answers.stream.hang_up(refused.value.farewell)
    with pytest.raises(HandshakeRejected, match="encrypts its connections, and this node does not") as caught:
        dials.feed(answers.out())
    assert not caught.value.foreign


def test_an_encrypting_dialler_is_refused_by_a_plaintext_node(
    encryption: Encryption, wires: Callable[..., Wire]
) -> None:
    """And told why: the reverse case."""
    dials = wires(encryption, answers=False)
    dials.stream.begin()
    with pytest.raises(HandshakeRejected, match="encrypts its connections, and this node does not") as refused:
        Answering(B, PortRole.LINK).feed(dials.out()[:1024])
    assert refused.value.farewell == ALERT
    with pytest.raises(HandshakeRejected, match="does not encrypt its connections, and this node does") as caught:
        dials.put(refused.value.farewell)
    assert not caught.value.foreign


def test_another_program_is_foreign(encryption: Encryption, wires: Callable[..., Wire]) -> None:
    """As without encryption: the intended peer no longer has that port."""
    dials, answers = wires(encryption, answers=False), wires(encryption, answers=True)
    dials.stream.begin()
    for one in (dials, answers):
        with pytest.raises(HandshakeRejected, match="does not speak elastic3d's protocol") as caught:
            one.put(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert caught.value.foreign


def test_little_is_read_before_the_proof(encryption: Encryption, wires: Callable[..., Wire]) -> None:
    """A peer that has agreed on encryption has proved nothing yet."""
    dials, answers = wires(encryption, answers=False), wires(encryption, answers=True)
    dials.stream.begin()
    pump(dials, answers)
    dials.stream.send(bytes(ENCRYPTED_LIMIT))
    with pytest.raises(HandshakeRejected, match="too much before it had proved itself"):
        pump(dials, answers, 4096)


def test_a_damaged_record_ends_the_connection(encryption: Encryption, wires: Callable[..., Wire]) -> None:
    """Whether it was changed, left out or repeated."""
    dials, answers = wires(encryption, answers=False), wires(encryption, answers=True)
    dials.stream.begin()
    pump(dials, answers)
    dials.stream.send(b"a beat")
    said = dials.out()
    assert answers.put(said) == b"a beat"
    with pytest.raises(HandshakeRejected, match="other than encrypted records"):
        answers.put(said)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.binary(min_size=1, max_size=400), begun=st.booleans(), answers=st.booleans())
def test_garbage_is_rejected_or_waited_for(
    encryption: Encryption, wires: Callable[..., Wire], data: bytes, begun: bool, answers: bool
) -> None:
    """Nothing else is raised, whoever sends it, and nothing of it is passed on."""
    one = wires(encryption, answers=answers)
    if not answers:
        one.stream.begin()
    try:
        assert one.put((b"\x16\x03\x01" if begun else b"") + data) is None
    except HandshakeRejected:
        pass
