"""The rows of the table of generations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from elastic3d.pages.markup import Html, join, tag

NAMED = 8
"""Nodes that came, and nodes that went, whose names a row has."""


class GenerationLine(Protocol):
    """What a row shows of a generation; `GenerationHistory` of a live job has it, too."""

    @property
    def number(self) -> int: ...
    @property
    def cause(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def active(self) -> int: ...
    @property
    def spares(self) -> int: ...
    @property
    def joined(self) -> tuple[str, ...]: ...
    @property
    def left(self) -> tuple[str, ...]: ...
    @property
    def layout(self) -> str: ...


def generation_row(line: GenerationLine, key: str, sealed: str, more: Sequence[Html] = ()) -> Html:
    """Return a generation's row: why it came to be, and with whom.

    key: what names the row among all. sealed: when it was, in words. more: cells before the last one.
    """
    cells = [
        tag("th", line.number, scope="row", class_="number"),
        tag("td", sealed, class_="nowrap"),
        tag("td", tag("span", (str(line.cause) or "not known").replace("_", " "), class_="cause")),
        tag("td", line.active, f" + {line.spares}" if line.spares else "", class_="number"),
        tag("td", moves(line.joined, line.left)),
        tag("td", line.layout or "", class_="wide"),
        *more,
        tag("td", line.detail, class_="text"),
    ]
    return tag("tr", *cells, data_key=key)


def moves(joined: Sequence[str], left: Sequence[str]) -> Html:
    """Return who came and who went."""
    changes = [*(f"+{name}" for name in joined[:NAMED]), *(f"-{name}" for name in left[:NAMED])]
    more = max(0, len(joined) - NAMED) + max(0, len(left) - NAMED)
    return join(" ".join(changes), f" and {more} more" if more else "")
