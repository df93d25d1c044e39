"""Moving bytes from one place of the host's memory to another by several threads.

One core moves fewer bytes a second than a device's link carries, so that a copy to the host or back would wait for it.
Each part is one memmove, which leaves the interpreter to the training; no tensor operation runs on these threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

Piece = tuple[int, int, int]
"""Address of the target, address of the source, number of bytes."""

LEAST = 8 << 20
"""Bytes for which several threads are asked: waking them takes as long as to move a part of that."""


class Movers:
    """For one thread, which moves a share itself. threads: how many move, it included."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="mover") if threads > 1 else None

    def move(self, pieces: Sequence[Piece]) -> None:
        """Move all pieces; targets and sources overlap nowhere."""
        if self._pool is None or sum(count for *_, count in pieces) < LEAST:
            _move(pieces)
            return
        *others, own = shares(pieces, self._threads)
        moved = [self._pool.submit(_move, share) for share in others]
        _move(own)
        for one in moved:
            one.result()


def shares(pieces: Sequence[Piece], number: int) -> list[list[Piece]]:
    """Return the same bytes as `number` lists of pieces, of as many bytes each as can be."""
    total = sum(count for *_, count in pieces)
    ends = [total * (share + 1) // number for share in range(number)]
    filled: list[list[Piece]] = [[] for _ in ends]
    share = passed = 0
    for piece in pieces:
        for part in _cut(piece, passed, ends):
            while passed >= ends[share]:
                share += 1
            filled[share].append(part)
            passed += part[2]
    return filled


def _cut(piece: Piece, begin: int, ends: Sequence[int]) -> Iterator[Piece]:
    """Yield a piece in parts that cross none of the ends. begin: bytes before it."""
    target, source, count = piece
    cuts = [0, *(end - begin for end in ends if begin < end < begin + count), count]
    for start, stop in pairwise(cuts):
        if stop > start:
            yield target + start, source + start, stop - start


def _move(pieces: Sequence[Piece]) -> None:
    for target, source, count in pieces:
        ctypes.memmove(target, source, count)
