"""Compare-and-swap without locks: versions of an object have numbers, and the highest counts (format.md, section 9).

A swap gives its bytes the number after the one it has read, by an operation of the file system that fails if the name
is taken, on one host as over a network: link(2). Of any number of rivals one succeeds, whatever happens to locks: they
may be ignored, lost with a lease, or held by a stranger for ever. No process waits for another.

Old versions are removed, and a writer that has slept since it read one could then take a number that is long past. So
the newest KEPT stay: a writer that finds its own among them took it while it was the next one. If it does not, it
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
    """The versions of one object. Number 0 is the object under its own name, which was there before any swap."""

    def numbers(self) -> Iterable[int]:
        """Return the taken numbers from 1 on, in any order, including all that were taken before the call."""
        ...

    def open(self, number: int) -> bytes | None:
        """Return a version's bytes, None if it is not there."""
        ...

    def link(self, number: int, data: bytes) -> bool:
        """Create a version, durably; False if the number is taken."""
        ...

    def remove(self, number: int) -> None:
        """Remove a version; nothing happens if it is not there."""
        ...


def newest(versions: Versions, where: str) -> tuple[int, Versioned] | None:
    """Return the version that counts and its number, None if there is no object; StoreError names `where`."""
    for _ in range(_READS):
        number = max(versions.numbers(), default=0)
        data = versions.open(number)
        if number == 0 and any(versions.numbers()):
            continue  # the first swap came in between
        if data is not None:
            return number, Versioned(data=data, token=f"{number}-{hexdigest(data)}")
        if number == 0:
            return None
    raise StoreError(f"{where} changed under every one of {_READS} reads; try again")


def swap(versions: Versions, expected: str, data: bytes, where: str) -> bool:
    """Make `data` the version that counts if `expected` is the token of the present one; False if it is not.

    StoreError if so many others came after it that it cannot be known whether this one succeeded.
    """
    version = newest(versions, where)
    if version is None or version[1].token != expected:
        return False
    return append(versions, version[0] + 1, data, where)


def append(versions: Versions, number: int, data: bytes, where: str) -> bool:
    """Make `data` version `number`; False if the number is taken."""
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
