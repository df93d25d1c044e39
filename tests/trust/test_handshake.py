"""Proofs between two processes of a run: only holders of the secret get in, whatever was recorded before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.trust.credentials import Credentials
from elastic3d.trust.frames import Forged, Seals
from elastic3d.trust.handshake import LIMIT, Answering, Dialling, HandshakeRejected, Keys, Peer, PortRole
from elastic3d.values import from_json, to_json

SECRET, OTHER = "5e" * 32, "a1" * 32
A, B = Credentials(secret=SECRET, id="a@1"), Credentials(secret=SECRET, id="b@2")
STRANGER = Credentials(secret=OTHER, id="a@1")


def meet(dials: Dialling, answers: Answering) -> tuple[Peer, Peer]:
    """Return what each side learns about the other."""
    answers.feed(dials.feed(answers.feed(dials.hello)))
    assert dials.peer is not None
    assert answers.peer is not None
    return dials.peer, answers.peer


def test_a_handshake_identifies_both_sides_and_agrees_on_keys() -> None:
    """Who it is, whom it meant, and of which generation; a key for each direction, new each time."""
    there, here = meet(Dialling(A, PortRole.LINK, meant="b@2", generation=7), Answering(B, PortRole.LINK))
    assert (there.id, here.id, here.meant, here.generation) == ("b@2", "a@1", "b@2", 7)
    assert there.keys == Keys(send=here.keys.receive, receive=here.keys.send)
    assert there.keys.send != there.keys.receive
    again, _ = meet(Dialling(A, PortRole.LINK), Answering(B, PortRole.LINK))
    assert again.keys != there.keys


def test_a_handshake_survives_any_fragmentation() -> None:
    """Byte by byte, and together with what follows."""
    dials, answers = Dialling(A, PortRole.TILES), Answering(B, PortRole.TILES)
    said = b"".join(answers.feed(bytes([byte])) for byte in dials.hello)
    proof = b"".join(dials.feed(bytes([byte])) for byte in said)
    answers.feed(proof + b"more")
    assert answers.peer is not None
    assert answers.peer.rest == b"more"


def test_a_stranger_is_rejected_by_both_sides() -> None:
    """One who answers without the secret, and one who dials without it."""
    dials, answers = Dialling(A, PortRole.TILES), Answering(STRANGER, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold this run's secret") as caught:
        dials.feed(answers.feed(dials.hello))
    assert not caught.value.foreign
    answers, ours = Answering(B, PortRole.TILES), Dialling(STRANGER, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold"):
        ours.feed(answers.feed(ours.hello))
    forged = Dialling(A, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold"):
        answers.feed(forged.feed(Answering(B, PortRole.TILES).feed(forged.hello)))
    assert answers.peer is None


def test_a_replayed_handshake_is_rejected() -> None:
    """All messages of a successful handshake, sent again."""
    dials, answers = Dialling(A, PortRole.LINK), Answering(B, PortRole.LINK)
    proof = dials.feed(answers.feed(dials.hello))
    again = Answering(B, PortRole.LINK)
    again.feed(dials.hello)
    with pytest.raises(HandshakeRejected):
        again.feed(proof)


def test_a_reflected_proof_is_rejected() -> None:
    """A dialler without the secret lets the peer prove it to itself."""
    answers, mirror = Answering(B, PortRole.LINK), Answering(B, PortRole.LINK)
    hello = Dialling(STRANGER, PortRole.LINK).hello
    answers.feed(hello)
    with pytest.raises(HandshakeRejected):
        answers.feed(mirror.feed(hello))


def test_a_proof_for_another_port_or_certificate_is_rejected() -> None:
    """Roles are not mixed up, and a man in the middle with a certificate of his own is detected."""
    with pytest.raises(HandshakeRejected, match="wants a port for 'link'"):
        Answering(B, PortRole.TILES).feed(Dialling(A, PortRole.LINK).hello)
    dials = Dialling(A, PortRole.TILES, binding=b"mallory's certificate")
    with pytest.raises(HandshakeRejected, match="does not hold"):
        dials.feed(Answering(B, PortRole.TILES, binding=b"b's certificate").feed(dials.hello))


@given(st.binary(min_size=LIMIT + 2, max_size=2 * LIMIT) | st.binary(max_size=200).map(lambda data: data + bytes(1100)))
def test_garbage_is_rejected_within_the_limit(data: bytes) -> None:
    """No side reads more than that before it rejects, and nothing else is raised."""
    for side in (Answering(B, PortRole.TILES), Dialling(A, PortRole.TILES)):
        with pytest.raises(HandshakeRejected):
            side.feed(data)


def test_changed_repeated_or_missing_frames_are_rejected() -> None:
    """A seal is for one direction and one place in the sequence."""
    key = bytes(range(32))
    ours, theirs = Seals(key), Seals(key)
    first, second = ours.next(b"one"), ours.next(b"two")
    theirs.check(b"one", first)
    with pytest.raises(Forged):
        Seals(key).check(b"One", first)
    with pytest.raises(Forged):
        Seals(key).check(b"two", second)
    theirs.check(b"two", second)
    with pytest.raises(Forged):
        theirs.check(b"two", second)


def test_the_secret_is_never_shown() -> None:
    """Neither by a repr nor by the error about it, but it is serialised where it must be."""
    assert SECRET not in repr(A)
    assert SECRET not in repr(Dialling(A, PortRole.LINK))
    assert from_json(Credentials, to_json(A)) == A
    with pytest.raises(ValueError, match="hexadecimal") as caught:
        Credentials(secret="zz" * 32, id="a@1")
    assert "zz" not in str(caught.value)
