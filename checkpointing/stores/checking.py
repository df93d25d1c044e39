"""Checks by reading back whether the store holds what was sent.

A store with a checksum of its own compares that (see `obstore.py`); this is for all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import blake3

from checkpointing.errors import Miswritten
from checkpointing.stores.protocol import Data, chunks

_PIECE = 8 << 20


class Readable(Protocol):
    """A store that can be read back."""

    @property
    def url(self) -> str:
        """The place, for messages."""
        ...

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        ...


class Sent:
    """Data that is hashed while it is sent. Iterating it again starts over."""

    def __init__(self, data: Data) -> None:
        """Wrap the data to be sent."""
        self._data = data
        self._hash = blake3.blake3()
        self._size = 0

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the chunks, hashing each."""
        self._hash, self._size = blake3.blake3(), 0
        for chunk in chunks(self._data):
            self._hash.update(chunk)
            self._size += chunk.nbytes
            yield chunk

    def compare(self, store: Readable, name: str) -> None:
        """Read the object back; Miswritten if it is not what was yielded last."""
        hasher = blake3.blake3()
        read = 0
        while True:
            piece = store.get(name, read, read + _PIECE)
            hasher.update(piece)
            read += len(piece)
            if len(piece) < _PIECE:
                break
        if read != self._size or hasher.digest() != self._hash.digest():
            raise miswritten(store.url, name)


def miswritten(url: str, name: str) -> Miswritten:
    """Return the error for an object that is not what was sent."""
    return Miswritten(
        f"store {url}: {name} is not what was sent: it changed on the way. Write it again; if that keeps happening, "
        "suspect a network device, a proxy or the store itself."
    )
