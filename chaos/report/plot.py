"""A loss curve as an SVG file, above that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import isfinite

from chaos.history.follow import Picture

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 880, 420, 64, 48, 24, 48
_COLOURS = {"death": "#c0392b", "join": "#27864a", "start": "#888888"}


Curve = Sequence[tuple[int, float]]
"""Losses by step."""


def loss_plot(picture: Picture, quiet: Picture | None = None) -> str:
    """Return an SVG document of loss by step; generations are marked, an undisturbed run lies below as a wide line."""
    marks = [(view.first_step, view.number, view.cause) for view in picture.generations if view.first_step is not None]
    return loss_curves(_points(picture), marks, None if quiet is None else _points(quiet))


def loss_curves(curve: Curve, marks: Sequence[tuple[int, int, str]], quiet: Curve | None = None) -> str:
    """Return the same of curves. marks: first step, number and cause of each generation."""
    # A script may tell its steps and not their losses, or diverge.
    curve = [(step, loss) for step, loss in curve if isfinite(loss)]
    quiet = None if quiet is None else [(step, loss) for step, loss in quiet if isfinite(loss)]
    curves = [curve] + ([quiet] if quiet is not None else [])
    steps = [*(step for one in curves for step, _ in one), *(step for step, _, _ in marks), 0]
    losses = [loss for one in curves for _, loss in one] or [0.0]
    low, high = min(losses), max(losses)
    last, span = max(max(steps), 1), (high - low) or 1.0

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - loss) / span

    def line(points: Sequence[tuple[int, float]], style: str) -> str:
        path = " ".join(f"{x(step):.1f},{y(loss):.2f}" for step, loss in points)
        return f'<polyline points="{path}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">Loss by step; vertical lines are new generations</text>',
    ]
    for tick in range(5):
        loss = low + span * tick / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        step = last * tick / 4
        parts.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{step:.0f}</text>')
    for first_step, number, cause in marks:
        at, colour = x(first_step), _COLOURS.get(cause, "#2c5f9e")
        label = escape(f"{number}: {cause}")
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="{colour}" '
            'stroke-dasharray="4 3"/>'
        )
        parts.append(f'<text x="{at + 4:.1f}" y="{_TOP - 6}" fill="{colour}">{label}</text>')
    if quiet is not None:
        parts.append(line(quiet, 'stroke="#f2b134" stroke-width="6" stroke-opacity="0.5"'))
        parts.append(
            f'<text x="{_WIDTH - _RIGHT}" y="20" text-anchor="end" fill="#b57d10">wide: undisturbed run</text>'
        )
    parts.append(line(curve, 'stroke="#1f4e79" stroke-width="1.6"'))
    return "\n".join([*parts, "</svg>", ""])


def _points(picture: Picture) -> list[tuple[int, float]]:
    return [(step.number, float.fromhex(step.loss)) for step in picture.steps]
