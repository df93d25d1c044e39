"""Bytes moved by several threads: all of them, each once, in shares of one size."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.devices import movers
from elastic3d.devices.movers import Movers, shares


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 5))
def test_shares_have_every_byte_once_and_are_of_one_size(counts: list[int], number: int) -> None:
    """Whatever the sizes of the pieces: one larger than a share is cut."""
    pieces = [(1000 * index, 500_000 + 1000 * index, count) for index, count in enumerate(counts)]
    found = shares(pieces, number)
    sizes = [sum(count for *_, count in share) for share in found]
    assert sum(sizes) == sum(counts)
    assert max(sizes) - min(sizes) <= 1
    moved = [(to + at, source + at) for share in found for to, source, count in share for at in range(count)]
    assert sorted(moved) == [(to + at, source + at) for to, source, count in pieces for at in range(count)]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bytes_arrive_whole(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few or many of them, by one thread or several."""
    monkeypatch.setattr(movers, "LEAST", 1000)
    mover = Movers(threads)
    for size in (1, 999, 100_000):
        source = (ctypes.c_ubyte * size)(*(at % 251 for at in range(size)))
        target = (ctypes.c_ubyte * size)()
        cut = size // 3
        begin, end = ctypes.addressof(source), ctypes.addressof(target)
        mover.move([(end, begin, cut), (end + cut, begin + cut, size - cut)])
        assert bytes(target) == bytes(source)
