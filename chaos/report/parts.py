"""What pages about runs are put together from: the page itself, tables, marks, and promises with what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from chaos.judging.promise import Promise
from chaos.report.style import STYLE
from elastic3d.pages.markup import Html, join, tag

SPACE = "\N{NO-BREAK SPACE}"
MOST = 20
"""Texts that are shown of one promise, or of a verdict; of more it is said how many there are."""
_NOTHING = "default-src 'none'; style-src 'unsafe-inline'"


def whole(title: str, parts: Iterable[Html]) -> str:
    """Return a page that loads nothing from elsewhere and runs no script."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_NOTHING),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *parts)), lang='en')}\n"


def verdict_box(sentence: str, seen: Sequence[str], kind: str) -> Html:
    """Return what a page begins with. kind: good, warn or bad."""
    listed = [tag("ul", *(tag("li", text) for text in some(seen)))] if seen else []
    return tag("header", tag("h1", sentence), *listed, class_=f"verdict-box {kind}")


def pairs(rows: Iterable[tuple[str, Html | str]]) -> Html:
    """Return names with what they stand for."""
    return tag("dl", *(tag(name, text) for row in rows for name, text in zip(("dt", "dd"), row, strict=True)))


def table(names: Iterable[str], rows: Iterable[Iterable[Html | str]], kind: str | None = None) -> Html:
    """Return a table, whose rows are cards on a phone."""
    names = tuple(names)
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names)))
    body = (
        tag("tr", *(tag("td", cell, data_label=name) for name, cell in zip(names, row, strict=True))) for row in rows
    )
    return tag("table", head, tag("tbody", *body), class_=kind)


def mark(text: str, kind: str) -> Html:
    """Return a word in a frame. kind: good, warn or bad."""
    return tag("span", text, class_=f"tag {kind}")


def source(page: str, row: str = "") -> Html:
    """Return which page of the documentation promises something."""
    return tag("div", f"docs/{page}" + (f": {row}" if row else ""), class_="small")


def promise_table(promises: Sequence[Promise]) -> Html:
    """Return what was promised, whether it held, and what was seen."""

    def rows() -> Iterator[Iterable[Html | str]]:
        for promise in promises:
            marks = {True: mark("held", "good"), False: mark("broken", "bad"), None: mark("not judged", "warn")}
            seen = join(*(tag("div", text) for text in some(promise.broken))) if promise.broken else promise.seen
            yield marks[promise.held], join(promise.says, source(promise.page)), seen

    return table(("", "what is promised", "what was seen"), rows(), "long")


def some(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the first texts, and how many more there are."""
    more = len(texts) - MOST
    return (*texts[:MOST], f"and {more} more") if more > 0 else tuple(texts)


def count(number: int, what: str) -> str:
    """Return a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
