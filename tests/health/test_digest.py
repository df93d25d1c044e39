"""The digest of bits sees every changed word and every move, and adds up over any cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.health import digest
from elastic3d.health.digest import BLOCK, digest_of, words_digest

MASK = (1 << 64) - 1
WORDS = st.lists(st.integers(0, MASK), min_size=1, max_size=40)
PLACES = st.sampled_from([0, 1, 7, BLOCK - 20, BLOCK - 1, 3 * BLOCK - 5, (1 << 40) + 3])


def array(words: list[int]) -> digest.Words:
    return np.array(words, dtype=np.uint64)


@given(words=WORDS, first=PLACES, data=st.data())
@settings(max_examples=200, deadline=None)
def test_the_digests_of_parts_add_up_to_that_of_the_whole(words: list[int], first: int, data: st.DataObject) -> None:
    """Wherever it is cut, and whatever else the whole holds."""
    cut = data.draw(st.integers(0, len(words)))
    parts = words_digest(array(words[:cut]), first) + words_digest(array(words[cut:]), first + cut)
    assert parts & MASK == words_digest(array(words), first)


@given(words=WORDS, first=PLACES, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_change_of_one_word_always_shows(words: list[int], first: int, data: st.DataObject) -> None:
    """Of any bit, or of all of them: odd weights have inverses."""
    at = data.draw(st.integers(0, len(words) - 1))
    changed = list(words)
    changed[at] ^= data.draw(st.integers(1, MASK))
    assert words_digest(array(changed), first) != words_digest(array(words), first)


@given(words=st.lists(st.integers(0, MASK), min_size=2, max_size=40, unique=True), data=st.data())
@settings(max_examples=200, deadline=None)
def test_swapped_words_show(words: list[int], data: st.DataObject) -> None:
    """An exclusive or of the words would let them pass."""
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = list(words)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    assert words_digest(array(swapped)) != words_digest(array(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("numel", [0, 1, 3, 8, 1001])
def test_a_tensor_of_any_dtype_has_the_digest_of_its_bytes(dtype: torch.dtype, numel: int) -> None:
    """The last word is filled up with zeros."""
    tensor = torch.randint(0, 2, (numel,)).to(dtype)
    data = bytes(tensor.view(torch.uint8).tolist()) if numel else b""
    data += bytes(-len(data) % 8)
    assert digest_of(tensor) == words_digest(np.frombuffer(data, dtype=np.uint64))


def test_shards_of_a_tensor_add_up_wherever_their_memory_begins() -> None:
    """A view need not begin at a multiple of 8 bytes in memory, as long as it does in the whole."""
    whole = torch.randn(4001)
    shifted = torch.empty(4002)[1:]
    shifted.copy_(whole)
    assert digest_of(shifted) == digest_of(whole)
    parts = [digest_of(shifted[a:b], start=4 * a) for a, b in ((0, 1000), (1000, 2002), (2002, 4001))]
    assert sum(parts) & MASK == digest_of(whole)


def test_the_device_comes_to_the_same_digest() -> None:
    """Its arithmetic is that of signed words, which wrap around alike."""
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (2 * BLOCK + 17,))
    for first in (0, 5, BLOCK - 1):
        assert int(digest._on_device(words, first)) & MASK == words_digest(words.numpy().view(np.uint64), first)


def test_zeros_at_other_places_are_told_apart_by_what_is_not_zero() -> None:
    """A digest does not depend on anything but words and their indices."""
    words = torch.zeros(100, dtype=torch.int64)
    seen = set()
    for at in range(100):
        words.zero_()
        words[at] = 1
        seen.add(digest_of(words))
    assert len(seen) == 100
