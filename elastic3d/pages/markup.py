"""HTML in which everything is escaped that is not said to be HTML: names and details come from others. Pure."""

from __future__ import annotations

import html

from elastic3d.cli.durations import spell
from elastic3d.cli.render import clean

VOID = ("col", "br", "meta")


class Html(str):
    """Text that is HTML already; any other text is escaped where it meets it."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return text for an element or an attribute: escaped, on one line, without characters that show nothing."""
    return Html(html.escape(clean(str(value))))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element.

    children: escaped unless they are `Html`. attributes: class_ for class, data_at for data-at; None and False are left
    out, True is an attribute without a value, and numbers with a point have one digit after it.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        words.append(attribute if value is True else f'{attribute}="{_value(value)}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in VOID else f"{start}{join(*children)}</{name}>")


def _value(value: object) -> Html:
    return text(f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value)


def join(*children: object) -> Html:
    """Return children one after the other, each escaped unless it is `Html`."""
    return Html("".join(child if isinstance(child, Html) else text(child) for child in children))


def ago(at: float, now: float, *, about: bool = False) -> Html:
    """Return how long ago a moment of this machine's wall clock is, in an element that the page's script keeps true."""
    words = f"{'about ' if about else ''}{spell(max(0.0, now - at))} ago"
    return tag("time", words, data_at=f"{at:.1f}", data_about=about)


def left(until: float, now: float) -> Html:
    """Return how long it is until a moment, in the same way."""
    return tag("time", f"{spell(max(0.0, until - now))} left", data_until=f"{until:.1f}")


def block(value: str) -> Html:
    """Return preformatted text of several lines."""
    return tag("pre", Html("\n".join(text(line) for line in value.splitlines())), tabindex=0)
