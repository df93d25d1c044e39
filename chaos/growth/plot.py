"""The series of a soak as small multiples in one SVG file: a panel for each group, what grows in red."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from chaos.growth.measures import Group, Measure
from chaos.growth.slopes import HOUR, Point

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 520, 270, 64, 60, 20, 34
_HEAD, _COLUMNS = 40, 2
_COLOURS = ("#1f4e79", "#d68910", "#27864a", "#7d3c98", "#4f9bd9", "#8d6e63", "#888888", "#16a085")
_GROWS = "#c0392b"
_ANCHORS = ("middle", "middle", "middle", "middle", "end")
_POINTS = 400
"""Most points of a curve."""


def growth_plot(title: str, measures: Sequence[Measure]) -> str:
    """Return an SVG document of all series over the time of the run."""
    groups = list(dict.fromkeys(measure.group for measure in measures))
    rows = -(-len(groups) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, _HEAD + rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="15">{escape(title)}</text>',
    ]
    since, until = _ends(measures)
    for at, group in enumerate(groups):
        x, y = at % _COLUMNS * _WIDTH, _HEAD + at // _COLUMNS * _HEIGHT
        own = [measure for measure in measures if measure.group == group]
        parts += [f'<g transform="translate({x},{y})">', *_panel(group, own, since, until), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def panels(measures: Sequence[Measure]) -> Iterator[str]:
    """Yield an SVG element for each group, for a page that says how it looks in `chaos.report.style`."""
    since, until = _ends(measures)
    for group in dict.fromkeys(measure.group for measure in measures):
        own = [measure for measure in measures if measure.group == group]
        inner = "".join(_panel(group, own, since, until))
        yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(group.name)}">{inner}</svg>'


def _ends(measures: Sequence[Measure]) -> tuple[float, float]:
    ends = [point.at for measure in measures for point in measure.points]
    return min(ends, default=0.0), max(ends, default=1.0)


def _panel(group: Group, measures: Sequence[Measure], since: float, until: float) -> list[str]:
    top = nice(max((point.value / group.scale for one in measures for point in one.points), default=1.0))
    span = (until - since) or 1.0
    hours = until > 2 * HOUR

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (at - since) / span

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / group.scale / top)

    parts = [f'<text x="{_LEFT}" y="14" font-size="12">{escape(group.name)}{_in(group)}</text>']
    for tick in range(5):
        value = top * tick / 4
        at = since + span * tick / 4
        shown = f"{at / HOUR:.1f} h" if hours else f"{at / 60:.1f} min"
        level = y(value * group.scale)
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}" stroke="#e3e3e3"/>',
            f'<text x="{_LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{value:,.5g}</text>',
            f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{_ANCHORS[tick]}">{shown}</text>',
        ]
    for number, measure in enumerate(measures):
        colour = _GROWS if measure.grows else _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{x(point.at):.1f},{y(point.value):.1f}" for point in _thinned(measure.points))
        bold = 2.4 if measure.grows else 1.3
        look = f"g{number % len(_COLOURS)}" if not measure.grows else "grows"
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{bold}" class="{look}"/>'
        )
        label = escape(f"{measure.name} grows" if measure.grows else measure.name)
        column, row = number % 3, number // 3
        parts.append(
            f'<text x="{_LEFT + column * 150}" y="{30 + row * 13}" fill="{colour}" class="{look}">{label}</text>'
        )
    return parts


def nice(most: float) -> float:
    """Return a round number at or above `most`, whose quarters are round too."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= most * (1 - 1e-9))


def _in(group: Group) -> str:
    return f", {group.unit}" if group.unit else ""


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    return points[:: -(-len(points) // _POINTS)] if points else points
