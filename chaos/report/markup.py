"""HTML and SVG that cannot be broken by what is put into it: text is escaped unless it is `Markup` already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = ("br", "meta")


class Markup(str):
    """Text that is HTML already. Only this module and literals of ours make it."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Return an element; children that are no `Markup`, and all attributes, are escaped.

    An underscore at an attribute's end is dropped, one within it is a hyphen; None leaves the attribute out. Numbers
    are written with one digit after the point.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """Return parts one after another, each escaped unless it is `Markup`."""
    separator = between if isinstance(between, Markup) else escape(between)
    return Markup(separator.join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _text(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
