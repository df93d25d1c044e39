"""The protocol of stores: the few operations that the format needs.

Names are relative, with `/` between parts, of letters, digits, `.`, `_` and `-`. Writes are atomic: an object is there
whole, or not. A write that raises StoreError may still have happened; callers read back (format.md, section 9).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from checkpointing.errors import StoreError

Data = bytes | memoryview | Iterable[bytes | memoryview]

_NAME = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """An object's bytes, and a token that changes whenever they do."""

    data: bytes
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An object as listings show it. modified: seconds by the store's own clock, comparable within one store only."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """A flat namespace of objects. Safe to use from several threads."""

    @property
    def url(self) -> str:
        """The place, for messages."""
        ...

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object; StoreNotFound if it is not there, fewer bytes if it is shorter."""
        ...

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        ...

    def size(self, name: str) -> int:
        """Return an object's bytes; StoreNotFound if it is not there."""
        ...

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, durably, replacing what was there. Chunks are streamed, never joined.

        With `check`, what the store then holds is compared with what was sent, by the store's own checksum or by
        reading back; Miswritten if they differ. A store that retries sends data again after a failure if it can be
        iterated again; it does not resend a generator. Where iterating the data raises, nothing is written.
        """
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object, durably; False if one was there, which is left untouched."""
        ...

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected` (None: if it is not there); False if it is not."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        ...


def chunks(data: Data) -> Iterator[memoryview]:
    """Yield the bytes of `data` piece by piece, without copying."""
    if isinstance(data, bytes | memoryview):
        data = (data,)
    for chunk in data:
        yield memoryview(chunk).cast("B")


def create(store: Store, name: str, data: bytes) -> bytes:
    """Create an object and return what is there now: `data`, or what another writer had written before.

    A lost response is resolved by reading back; StoreError if the object is not there after all.
    """
    try:
        if store.put_if_absent(name, data):
            return data
    except StoreError:
        versioned = store.read(name)
        if versioned is None:
            raise
        return versioned.data
    return store.get(name)


def decides_creations(store: Store) -> bool:
    """Return whether the place itself lets exactly one of several writers create an object.

    Otherwise, objects are created under names that no other writer uses.
    """
    return getattr(store, "decides_creations", True) is not False


def check_name(name: str) -> str:
    """Return `name` if it is one; ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an object")
    return name
