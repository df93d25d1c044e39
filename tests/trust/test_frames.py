"""One way to frame what is said on a connection, in each of its shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.trust.frames import Forged, Frames, FrameShape, FrameTooLong
from elastic3d.trust.handshake import Keys

SHAPES = {
    "tile server and table": FrameShape(most=1000),
    "links": FrameShape(most=1000, kind_bytes=1, length_bytes=2, seal_bytes=8),
    "local slots": FrameShape(most=1000, order="little"),
}
THERE, BACK = Keys(send=b"a" * 32, receive=b"b" * 32), Keys(send=b"b" * 32, receive=b"a" * 32)


def pair(shape: FrameShape, sealed: bool = True) -> tuple[Frames, Frames]:
    return (Frames(shape, THERE), Frames(shape, BACK)) if sealed else (Frames(shape), Frames(shape))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sealed", [True, False])
@given(bodies=st.lists(st.binary(max_size=60), max_size=8), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_frames_survive_any_cut(shape: FrameShape, sealed: bool, bodies: list[bytes], sizes: list[int]) -> None:
    """Whatever the pieces that arrive, the frames are those that were sent, in order."""
    ours, theirs = pair(shape, sealed)
    kind = b"k" * shape.kind_bytes
    data = b"".join(ours.pack(body, kind) for body in bodies)
    read_back, at = [], 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        theirs.take(data[at : at + size])
        at += size
        while (frame := theirs.next_kind()) is not None:
            read_back.append(frame)
    assert read_back == [(kind, body) for body in bodies]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_byte_behind_a_frame_is_wanted(shape: FrameShape) -> None:
    """Who reads what is wanted, and no more, leaves what follows the frame in the socket."""
    ours, theirs = pair(shape)
    data, at = ours.pack(b"body", b"k" * shape.kind_bytes), 0
    while theirs.wanted:
        assert theirs.next() is None
        part = data[at : at + theirs.wanted]
        theirs.take(part)
        at += len(part)
    assert at == len(data)
    assert theirs.next() == b"body"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_what_was_changed_repeated_or_is_too_long_is_noticed(shape: FrameShape) -> None:
    """A flipped bit, in a head where it is sealed too; a frame that comes twice; a length that is none of ours."""
    kind = b"k" * shape.kind_bytes
    for place in (0,) if kind else (-1, shape.head_bytes):
        ours, theirs = pair(shape)
        data = bytearray(ours.pack(b"body", kind))
        data[place] ^= 1
        theirs.take(data)
        with pytest.raises(Forged):
            theirs.next()
    ours, theirs = pair(shape)
    data = bytearray(ours.pack(b"body", kind))
    theirs.take(data + data)
    assert theirs.next() == b"body"
    with pytest.raises(Forged):
        theirs.next()
    ours, theirs = pair(shape)
    theirs.take(ours.pack(bytes(1001), kind)[:-500])
    with pytest.raises(FrameTooLong, match="1001 bytes"):
        theirs.next()
