"""Compare-and-swap without locks: versions of an object have numbers, and the highest counts (format.md, section 9).

Whoever swaps gives its bytes the number after the one it has read, by an operation of the file system that fails where
the name is taken, on one host as over a network: link(2). Of any number of rivals one succeeds, whatever becomes of
locks: they may be ignored, lost with a lease, or held by a stranger for ever. Nobody waits for anybody.

Old versions are removed, and a writer that slept since it read one could then take a number that is long passed. So the
newest KEPT stay: a writer that finds its own among them has taken it while it was the next one. Where it does not, it
cannot know, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from checkpointing.errors import StoreError
from checkpointing.format.encoding import hexdigest
from checkpointing.stores.protocol import Versioned

KEPT = 16
_READS = 16


class Versions(Protocol):
    """The versions of one object. Number 0 is what is under the object's own name, and was there before any swap."""

    def numbers(self) -> Iterable[int]:
        """Return the numbers from 1 that are taken, in any order; what was taken before the call is not left out."""
        ...

    def open(self, number: int) -> bytes | None:
        """Return a version's bytes, None when it is not there."""
        ...

    def link(self, number: int, data: bytes) -> bool:
        """Create a version, durably; False when the number is taken."""
        ...

    def remove(self, number: int) -> None:
        """Remove a version; nothing happens if it is not there."""
        ...


def newest(versions: Versions, where: str) -> tuple[int, Versioned] | None:
    """Return the version that counts and its number, None when there is no object; StoreError names `where`."""
    for _ in range(_READS):
        number = max(versions.numbers(), default=0)
        data = versions.open(number)
        if number == 0 and any(versions.numbers()):
            continue  # the first swap came between
        if data is not None:
            return number, Versioned(data=data, token=f"{number}-{hexdigest(data)}")
        if number == 0:
            return None
    raise StoreError(f"{where} changed under every one of {_READS} reads; try again")


def swap(versions: Versions, expected: str, data: bytes, where: str) -> bool:
    """Make `data` the version that counts if `expected` is the token of the one that does; False if it is not.

    StoreError when so many others came after that it cannot be known whether this one was.
    """
    found = newest(versions, where)
    if found is None or found[1].token != expected:
        return False
    return append(versions, found[0] + 1, data, where)


def append(versions: Versions, number: int, data: bytes, where: str) -> bool:
    """Make `data` version `number`; False if another is."""
    if not versions.link(number, data):
        return False
    taken = list(versions.numbers())
    top = max(taken, default=0)
    for old in taken:
        if old <= top - KEPT:
            versions.remove(old)
    if top >= number + KEPT:
        raise StoreError(
            f"{where} was swapped {top - number} times while this process stood still; whether its own swap was among "
            "them is unknown. Read it and decide anew."
        )
    return True
