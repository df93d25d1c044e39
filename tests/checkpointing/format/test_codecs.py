"""A codec gives back what went in, and refuses what cannot be that."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import Corrupt
from checkpointing.format.codecs import Codec, decode, encode


@given(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_every_codec_gives_back_the_bytes(itemsize: int, elements: int, seed: int) -> None:
    """Whatever they are, and whatever the base is."""
    random = np.random.default_rng(seed)
    data, base = random.bytes(itemsize * elements), random.bytes(itemsize * elements)
    for codec in Codec:
        stored = encode(codec, data, itemsize, base)
        assert bytes(decode(codec, stored, len(data), itemsize, base)) == data


def test_weights_become_smaller() -> None:
    """Exponents repeat; a small step changes few bits of a bf16 weight."""
    weights = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert len(encode(Codec.PLANES, weights.tobytes(), 4)) < 0.9 * weights.nbytes
    bf16 = (weights.view(np.uint32) >> 16).astype(np.uint16)
    later = ((weights * (1 + 1e-4)).view(np.uint32) >> 16).astype(np.uint16)
    assert len(encode(Codec.XOR_PLANES, later.tobytes(), 2, bf16.tobytes())) < 0.3 * bf16.nbytes


@pytest.mark.parametrize("codec", [Codec.PLANES, Codec.XOR_PLANES])
def test_other_lengths_are_refused(codec: Codec) -> None:
    """Before anything is allocated: a frame that declares more than the tile has is no tile."""
    stored = encode(codec, bytes(4000), 4, bytes(4000))
    for nbytes in (3996, 4004):
        with pytest.raises(Corrupt):
            decode(codec, stored, nbytes, 4, bytes(nbytes))
    for damaged in (stored[:-1], b"", bytes(stored)[:5] + b"\xff" * 20):
        with pytest.raises(Corrupt):
            decode(codec, damaged, 4000, 4, bytes(4000))
    with pytest.raises(Corrupt):
        decode(Codec.RAW, bytes(10), 12, 4)
