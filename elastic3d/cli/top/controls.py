"""What the keys of `elastic3d top` do: which page of the nodes is shown, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Key(StrEnum):
    """A key that does something; the values are words for people."""

    QUIT = "q"
    NEXT_COLUMN = "s"
    LAST_COLUMN = "S"
    REVERSE = "r"
    NEXT_PAGE = "right"
    LAST_PAGE = "left"
    FIRST = "home"
    LAST = "end"


_ESCAPES = {
    "A": Key.LAST_PAGE,
    "B": Key.NEXT_PAGE,
    "C": Key.NEXT_PAGE,
    "D": Key.LAST_PAGE,
    "H": Key.FIRST,
    "F": Key.LAST,
    "1~": Key.FIRST,
    "4~": Key.LAST,
    "5~": Key.LAST_PAGE,
    "6~": Key.NEXT_PAGE,
    "7~": Key.FIRST,
    "8~": Key.LAST,
}
"""What follows ESC [, or ESC O: as xterm, rxvt and the console have it."""

_PLAIN = {
    "q": Key.QUIT,
    "Q": Key.QUIT,
    "s": Key.NEXT_COLUMN,
    ">": Key.NEXT_COLUMN,
    "S": Key.LAST_COLUMN,
    "<": Key.LAST_COLUMN,
    "r": Key.REVERSE,
    "R": Key.REVERSE,
    " ": Key.NEXT_PAGE,
    "n": Key.NEXT_PAGE,
    "p": Key.LAST_PAGE,
}

LONGEST = 16
"""Characters after which an escape sequence that has not ended is none."""


class KeyReader:
    """Finds keys in what a terminal sends; an escape sequence may come in pieces."""

    def __init__(self) -> None:
        self._rest = ""

    def read(self, sent: bytes) -> Iterator[Key]:
        """Yield the keys; what is none is passed over."""
        text, self._rest = self._rest + sent.decode("latin-1"), ""
        at = 0
        while at < len(text):
            if text[at] != "\x1b":
                if text[at] in _PLAIN:
                    yield _PLAIN[text[at]]
                at += 1
                continue
            end = at + 2
            while end < len(text) and (text[end].isdigit() or text[end] == ";"):
                end += 1
            if at + 1 < len(text) and text[at + 1] not in "[O":
                at += 1
            elif end < len(text):
                body = text[at + 2 : end + 1]
                if body in _ESCAPES:
                    yield _ESCAPES[body]
                at = end + 1
            else:
                self._rest = text[at:] if len(text) - at <= LONGEST else ""
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """What is shown of the nodes: column `sort`, by number, orders them; page from 0, as far as there are so many."""

    sort: int = 0
    reverse: bool = False
    page: int = 0

    def pressed(self, key: Key, *, columns: int, pages: int) -> Controls:
        """Return what is shown after a key. columns, pages: how many there are."""
        page = min(self.page, max(0, pages - 1))
        match key:
            case Key.NEXT_COLUMN:
                return replace(self, sort=(self.sort + 1) % columns, page=0)
            case Key.LAST_COLUMN:
                return replace(self, sort=(self.sort - 1) % columns, page=0)
            case Key.REVERSE:
                return replace(self, reverse=not self.reverse, page=0)
            case Key.NEXT_PAGE:
                return replace(self, page=min(page + 1, max(0, pages - 1)))
            case Key.LAST_PAGE:
                return replace(self, page=max(0, page - 1))
            case Key.FIRST:
                return replace(self, page=0)
            case Key.LAST:
                return replace(self, page=max(0, pages - 1))
            case _:
                return self
