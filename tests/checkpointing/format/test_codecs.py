"""A codec reproduces its input, and refuses frames that cannot be right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import Corrupt
from checkpointing.format.codecs import Codec, decode, encode


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_every_codec_reproduces_the_bytes(itemsize: int, elements: int, seed: int) -> None:
    """Any bytes with any base."""
    random = np.random.default_rng(seed)
    data, base = random.bytes(itemsize * elements), random.bytes(itemsize * elements)
    for codec in Codec:
        stored = encode(codec, data, itemsize, base)
        assert bytes(decode(codec, stored, len(data), itemsize, base)) == data


def test_codecs_make_weights_smaller() -> None:
    """Exponents repeat, and a small step changes few bits of a bf16 weight."""
    weights = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert len(encode(Codec.PLANES, weights.tobytes(), 4)) < 0.9 * weights.nbytes
    bf16 = (weights.view(np.uint32) >> 16).astype(np.uint16)
    later = ((weights * (1 + 1e-4)).view(np.uint32) >> 16).astype(np.uint16)
    assert len(encode(Codec.XOR_PLANES, later.tobytes(), 2, bf16.tobytes())) < 0.3 * bf16.nbytes


@pytest.mark.parametrize("codec", [Codec.PLANES, Codec.XOR_PLANES])
def test_frames_of_another_length_are_refused(codec: Codec) -> None:
    """Before anything is allocated, if a frame declares more bytes than the tile has."""
    stored = encode(codec, bytes(4000), 4, bytes(4000))
    for nbytes in (3996, 4004):
        with pytest.raises(Corrupt):
            decode(codec, stored, nbytes, 4, bytes(nbytes))
    for damaged in (stored[:-1], b"", bytes(stored)[:5] + b"\xff" * 20):
        with pytest.raises(Corrupt):
            decode(codec, damaged, 4000, 4, bytes(4000))
    with pytest.raises(Corrupt):
        decode(Codec.RAW, bytes(10), 12, 4)
