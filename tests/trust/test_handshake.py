"""Proofs between two processes of a run: who holds the secret gets in, nobody else, whatever was recorded before."""

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
    """Return what each side learns of the other."""
    answers.feed(dials.feed(answers.feed(dials.hello)))
    assert dials.peer is not None
    assert answers.peer is not None
    return dials.peer, answers.peer


def test_both_sides_know_each_other_and_have_the_same_keys() -> None:
    """Who it is, whom it meant, of which generation; a key for each direction, new each time."""
    there, here = meet(Dialling(A, PortRole.LINK, meant="b@2", generation=7), Answering(B, PortRole.LINK))
    assert (there.id, here.id, here.meant, here.generation) == ("b@2", "a@1", "b@2", 7)
    assert there.keys == Keys(send=here.keys.receive, receive=here.keys.send)
    assert there.keys.send != there.keys.receive
    again, _ = meet(Dialling(A, PortRole.LINK), Answering(B, PortRole.LINK))
    assert again.keys != there.keys


def test_it_does_not_matter_how_it_arrives() -> None:
    """Byte by byte, and with what follows already behind it."""
    dials, answers = Dialling(A, PortRole.TILES), Answering(B, PortRole.TILES)
    said = b"".join(answers.feed(bytes([byte])) for byte in dials.hello)
    proof = b"".join(dials.feed(bytes([byte])) for byte in said)
    answers.feed(proof + b"more")
    assert answers.peer is not None
    assert answers.peer.rest == b"more"


def test_a_stranger_is_rejected_by_both_sides() -> None:
    """Who answers without the secret, and who dials without it."""
    dials, answers = Dialling(A, PortRole.TILES), Answering(STRANGER, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold this run's secret") as told:
        dials.feed(answers.feed(dials.hello))
    assert not told.value.foreign
    answers, ours = Answering(B, PortRole.TILES), Dialling(STRANGER, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold"):
        ours.feed(answers.feed(ours.hello))
    forged = Dialling(A, PortRole.TILES)
    with pytest.raises(HandshakeRejected, match="does not hold"):
        answers.feed(forged.feed(Answering(B, PortRole.TILES).feed(forged.hello)))
    assert answers.peer is None


def test_a_recording_proves_nothing() -> None:
    """All that was said in a handshake that went well, said again."""
    dials, answers = Dialling(A, PortRole.LINK), Answering(B, PortRole.LINK)
    proof = dials.feed(answers.feed(dials.hello))
    again = Answering(B, PortRole.LINK)
    again.feed(dials.hello)
    with pytest.raises(HandshakeRejected):
        again.feed(proof)


def test_an_answer_sent_back_is_no_proof() -> None:
    """Who has no secret dials, and has the one it dialled prove it to itself."""
    answers, mirror = Answering(B, PortRole.LINK), Answering(B, PortRole.LINK)
    hello = Dialling(STRANGER, PortRole.LINK).hello
    answers.feed(hello)
    with pytest.raises(HandshakeRejected):
        answers.feed(mirror.feed(hello))


def test_a_proof_for_another_port_or_another_certificate_is_none() -> None:
    """Roles are not mixed up, and somebody in between who shows a certificate of his own is found out."""
    with pytest.raises(HandshakeRejected, match="wants a port for 'link'"):
        Answering(B, PortRole.TILES).feed(Dialling(A, PortRole.LINK).hello)
    dials = Dialling(A, PortRole.TILES, binding=b"mallory's certificate")
    with pytest.raises(HandshakeRejected, match="does not hold"):
        dials.feed(Answering(B, PortRole.TILES, binding=b"b's certificate").feed(dials.hello))


@given(st.binary(min_size=LIMIT + 2, max_size=2 * LIMIT) | st.binary(max_size=200).map(lambda data: data + bytes(1100)))
def test_garbage_is_rejected_within_the_limit(data: bytes) -> None:
    """Whatever it is, no side takes more than that before it is done with it, and nothing else is raised."""
    for side in (Answering(B, PortRole.TILES), Dialling(A, PortRole.TILES)):
        with pytest.raises(HandshakeRejected):
            side.feed(data)


def test_frames_that_were_changed_repeated_or_left_out_are_forged() -> None:
    """A seal is of one direction and of one place in the sequence."""
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
    """Not by a repr, nor by the error about it; and it travels where it must."""
    assert SECRET not in repr(A)
    assert SECRET not in repr(Dialling(A, PortRole.LINK))
    assert from_json(Credentials, to_json(A)) == A
    with pytest.raises(ValueError, match="hexadecimal") as told:
        Credentials(secret="zz" * 32, id="a@1")
    assert "zz" not in str(told.value)
