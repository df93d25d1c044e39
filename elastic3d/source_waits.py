"""What the loader of a trainer waits for now: the names of sources of data, where the trainer's keeper reads them.

Each process that loads samples has a place in the trainer's progress page, of which it alone writes; a process is
forked with the page. Whoever waits for a source says so with `source`, and the innermost one counts. Where there is no
page, as in a script that runs by itself, nothing is written.

    a place    16 words: since when, in nanoseconds of the monotonic clock, 0 for nothing; then the name, UTF-8
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from elastic3d.clock import nanoseconds

PLACES, WORDS = 24, 16
"""How many processes have a place, and how large it is. Further loaders' processes say nothing."""

_LONGEST = 8 * (WORDS - 1)


class _Place:
    """This process's place. page: words of all places, None for nowhere. process: who took it; forks did not."""

    def __init__(self) -> None:
        self.page: memoryview | None = None
        self.number = self.process = 0
        self.open: list[tuple[int, bytes]] = []

    def write(self) -> None:
        if self.page is None or self.process != os.getpid() or self.number >= PLACES:
            return
        words, at = self.page, self.number * WORDS
        words[at] = 0
        if self.open:
            since, name = self.open[-1]
            words[at + 1 : at + WORDS] = memoryview(name.ljust(_LONGEST, b"\0")).cast("Q")
            words[at] = since


_own = _Place()


def record_in(page: memoryview | None) -> None:
    """Have this process, a trainer, and the loaders' processes that it forks write there; None for nowhere.

    page: `PLACES` times `WORDS` words, zeros.
    """
    _own.page, _own.number, _own.process = page, 0, os.getpid()


def clear() -> None:
    """Forget the loaders' processes of before: new ones are about to be forked by this one."""
    if _own.page is not None and _own.process == os.getpid():
        for number in range(1, PLACES):
            _own.page[number * WORDS] = 0


def take_place(worker: int) -> None:
    """Write from now on as the loader's process of this number, from 0."""
    _own.number, _own.process, _own.open = worker + 1, os.getpid(), []


@contextmanager
def source(name: str) -> Iterator[None]:
    """Say, while the block runs, that this process waits for a source of data: a URL, or a class's name."""
    if _own.page is None:
        yield
        return
    opened = (nanoseconds(), name.encode()[:_LONGEST])
    _own.open.append(opened)
    _own.write()
    try:
        yield
    finally:
        _own.open.remove(opened)
        _own.write()


def longest_awaited(words: tuple[int, ...]) -> str:
    """Return the name that has been waited for longest in a copy of all places, "" for none."""
    waiting = [(words[at], at) for at in range(0, PLACES * WORDS, WORDS) if words[at]]
    if not waiting:
        return ""
    _, at = min(waiting)
    said = b"".join(word.to_bytes(8, sys.byteorder) for word in words[at + 1 : at + WORDS]).rstrip(b"\0")
    return "".join(letter if letter.isprintable() else "?" for letter in said.decode(errors="replace"))
