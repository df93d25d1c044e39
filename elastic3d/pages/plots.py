"""Curves as SVG that fits any width and needs no script. Pure.

Lines are drawn in a picture of their own that is stretched to the width there is, and words lie beside it, so that a
phone's reader sees them in their own size. All numbers are finite: whoever plots leaves others out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic3d.pages.markup import Html, join, tag

LOWEST, HIGHEST = 84.0, 8.0
"""Per cent of a picture's height, from its top, at which the plane ends and begins."""

TICKS_ACROSS, TICKS_UP = 5, 4
MARKS = 60
"""Generations above which their marks have no names, which would cover each other."""

PLANE = 1000
"""Units of the plane's width and height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotPoint:
    """One point of a curve, that may stand for many: `low` and `high` are then the least and the most of them."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotMark:
    """A vertical line. name: of what began there."""

    x: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A curve and how it is drawn.

    kind: its class, by which it has its colour. across: says in words what an x is. least, most: of the x axis, None
    for those of the points. from_zero: whether the y axis begins at 0. class_: more classes of the picture.
    """

    title: str
    kind: str
    points: Sequence[PlotPoint]
    across: Callable[[float], str]
    marks: Sequence[PlotMark] = ()
    least: float | None = None
    most: float | None = None
    from_zero: bool = False
    unit: str = ""
    class_: str = ""


def plotted(plot: Plot) -> Html:
    """Return a plot as an SVG picture."""
    points = plot.points
    if not points:
        nothing = tag("text", "not known", x="50%", y="50%", text_anchor="middle")
        return tag("svg", nothing, role="img", aria_label=f"{plot.title}: not known", class_=plot.class_ or None)
    left = plot.least if plot.least is not None else points[0].x
    right = max(plot.most if plot.most is not None else points[-1].x, left + 1e-9)
    bottom, top = _range(plot)

    def x(value: float) -> float:
        return (min(max(value, left), right) - left) / (right - left)

    def y(value: float) -> float:
        return (top - min(max(value, bottom), top)) / (top - bottom)

    least, most = min(one.y for one in points), max(one.y for one in points)
    between = f"between {_short(least)} and {_short(most)}{plot.unit}"
    said = f"{plot.title}: {_short(points[0].y)} at first, {_short(points[-1].y)} at last, {between}"
    return tag(
        "svg",
        *_across(plot, left, right, x),
        *_up(bottom, top, y, plot.unit),
        *_marks(plot, x),
        tag(
            "svg",
            *_lines(plot, x, y),
            x=0,
            y=f"{HIGHEST:g}%",
            width="100%",
            height=f"{LOWEST - HIGHEST:g}%",
            viewBox=f"0 0 {PLANE} {PLANE}",
            preserveAspectRatio="none",
        ),
        role="img",
        aria_label=said,
        class_=plot.class_ or None,
    )


def _range(plot: Plot) -> tuple[float, float]:
    ends = [end for one in plot.points for end in (one.y, one.low, one.high) if end is not None]
    low, high = (0.0 if plot.from_zero else min(ends)), max(ends)
    if high - low <= 1e-9 * max(1.0, abs(high)):
        high += abs(high) * 0.1 or 1.0
        low -= 0.0 if plot.from_zero else abs(low) * 0.1 or 1.0
    room = (high - low) * 0.06
    return low - (0.0 if plot.from_zero else room), high + room


def _across(plot: Plot, left: float, right: float, x: Callable[[float], float]) -> list[Html]:
    base = f"{LOWEST:g}%"
    parts = [tag("line", x1=0, x2="100%", y1=base, y2=base, class_="axis")]
    for number in range(TICKS_ACROSS):
        value = left + (right - left) * number / (TICKS_ACROSS - 1)
        anchor = "start" if not number else "end" if number == TICKS_ACROSS - 1 else "middle"
        words = plot.across(value)
        parts.append(tag("text", words, x=_per_cent(x(value)), y="96%", text_anchor=anchor))
    return parts


def _up(bottom: float, top: float, y: Callable[[float], float], unit: str) -> list[Html]:
    parts = []
    for value in ticks(bottom, top, TICKS_UP):
        at = f"{HIGHEST + (LOWEST - HIGHEST) * y(value):.2f}%"
        parts.append(tag("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(tag("text", f"{_short(value)}{unit}", x=2, y=at, dy=-3))
    return parts


def _marks(plot: Plot, x: Callable[[float], float]) -> list[Html]:
    named = len(plot.marks) <= MARKS
    parts: list[Html] = []
    written = -1.0
    for mark in plot.marks:
        at = x(mark.x)
        across = {"x1": _per_cent(at), "x2": _per_cent(at)}
        parts.append(tag("line", tag("title", mark.name), **across, y1="5%", y2=f"{LOWEST:g}%", class_="mark"))
        if named and at - written > 0.05:
            anchor = "start" if at < 0.03 else "end" if at > 0.97 else "middle"
            parts.append(tag("text", mark.name, x=_per_cent(at), y="4.5%", text_anchor=anchor))
            written = at
    return parts


def _lines(plot: Plot, x: Callable[[float], float], y: Callable[[float], float]) -> list[Html]:
    def spot(across: float, up: float) -> str:
        return f"{x(across) * PLANE:.1f} {y(up) * PLANE:.1f}"

    parts = []
    banded = [(one.x, one.low, one.high) for one in plot.points if one.low is not None and one.high is not None]
    if len(banded) > 1:
        edge = [spot(at, high) for at, _, high in banded] + [spot(at, low) for at, low, _ in reversed(banded)]
        parts.append(tag("path", d=f"M{'L'.join(edge)}Z", class_="band"))
    path = "L".join(spot(one.x, one.y) for one in plot.points)
    if len(plot.points) == 1:
        path += f"L{path}"  # a dot, as the ends of lines are round
    parts.append(tag("path", d=f"M{path}", class_=f"line {plot.kind}", vector_effect="non-scaling-stroke"))
    return parts


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return about `most` round numbers between two others."""
    raw = (high - low) / most
    if not raw > 0 or not math.isfinite(raw):
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size for one in (1, 2, 5, 10) if (size := one * power) >= raw * 0.999)
    first = math.ceil(low / step)
    return [number * step for number in range(first, first + most + 2) if number * step <= high]


def bar(shares: Sequence[tuple[str, float, str]]) -> Html:
    """Return parts of a whole as a bar. shares: the class of each, its share from 0 to 1, and its name."""
    at, parts = 0.0, []
    for kind, share, name in shares:
        parts.append(
            tag("rect", tag("title", name), x=_per_cent(at), width=_per_cent(share), height="100%", class_=kind)
        )
        at += share
    return tag("svg", join(*parts), class_="share", aria_hidden="true")


def _per_cent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def _short(value: float) -> str:
    return f"{value:.4g}"
