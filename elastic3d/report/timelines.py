"""What the time of a node went to, as SVG rows of one scale. Pure."""

from __future__ import annotations

from collections.abc import Collection

from elastic3d.accounting.spans import Category
from elastic3d.cli.goodput_words import spelled
from elastic3d.pages.markup import Html, tag
from elastic3d.report.document import NodeTimeline, RunReport

WIDTH = 1_000_000
"""Units of a row's width: what is thinner than one is not there."""

TICKS = 5
MARKS = 200
"""Generations and checkpoints of which a ruler has marks."""


def timeline(one: NodeTimeline, length: int) -> Html:
    """Return a node's row. length: of the run, in microseconds."""
    parts = []
    for band in one.bands:
        if band.category is Category.AWAY:
            continue
        name = f"{band.category} {spelled(band.stop - band.start)}, from {spelled(band.start)} to {spelled(band.stop)}"
        start, stop = _at(band.start, length), _at(band.stop, length)
        parts.append(
            tag("rect", tag("title", name), x=start, width=max(1, stop - start), height=10, class_=f"c-{band.category}")
        )
    return tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{one.node}: its time by categories; the table below has the sums",
        class_="line",
    )


def ruler(report: RunReport) -> Html:
    """Return the scale of all rows, with a mark for each generation and for each checkpoint."""
    length = report.account.microseconds
    parts = []
    for number in range(TICKS):
        anchor = "start" if not number else "end" if number == TICKS - 1 else "middle"
        share = number / (TICKS - 1)
        parts.append(tag("text", spelled(round(length * share)), x=f"{100 * share:g}%", y="90%", text_anchor=anchor))
    for kind, at, name in [
        *(("mark", one.sealed, f"generation {one.number}") for one in report.generations[-MARKS:]),
        *(
            ("saved", one.committed, f"checkpoint of step {one.step}")
            for one in report.checkpoints[-MARKS:]
            if one.committed is not None
        ),
    ]:
        across = {name: f"{100 * _at(at, length) / WIDTH:.3f}%" for name in ("x1", "x2")}
        parts.append(tag("line", tag("title", name), **across, y1="0", y2="45%", class_=kind))
    return tag("svg", *parts, role="img", aria_label="Scale, with generations and checkpoints", class_="ruler")


def key(seen: Collection[Category]) -> Html:
    """Return which colour stands for what."""
    square = {"width": 12, "height": 12}
    rows = [
        tag("li", tag("svg", tag("rect", **square, class_=f"c-{one}"), **square, aria_hidden="true"), str(one))
        for one in Category
        if one in seen and one is not Category.AWAY
    ]
    dashes = [("mark", "generation"), ("saved", "checkpoint")]
    rows += [
        tag("li", tag("svg", tag("line", x1=6, x2=6, y1=0, y2=12, class_=kind), **square, aria_hidden="true"), name)
        for kind, name in dashes
    ]
    return tag("ul", *rows, class_="key")


def _at(at: int, length: int) -> int:
    return at * WIDTH // length if length else 0
