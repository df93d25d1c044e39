"""The nodes of a trace, the steps that each policy made, and where node-seconds went, as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from chaos.goodput.compare import Comparison
from chaos.goodput.ledger import Spent
from chaos.goodput.lives import Crowd

_WIDTH, _LEFT, _RIGHT = 960, 190, 24
_NODES, _STEPS, _BAR, _GAP = 90, 260, 22, 56
_POINTS = 600
"""Most points of a curve."""

_POLICIES = ("#1f4e79", "#4f9bd9", "#c0392b", "#d68910", "#7d3c98")
_ORACLE = "#888888"
_SPENT = {
    Spent.USEFUL: "#27864a",
    Spent.REPEATED: "#c0392b",
    Spent.RECOVERY: "#e67e22",
    Spent.CHANGE: "#f2c94c",
    Spent.SAVING: "#7d3c98",
    Spent.JOINING: "#4f9bd9",
    Spent.SPARE: "#95a5a6",
    Spent.LEAVING: "#c8a2c8",
    Spent.WAITING: "#d5dbdb",
}


def goodput_plot(title: str, crowd: Crowd, comparison: Comparison) -> str:
    """Return an SVG document: nodes held, steps that count, and shares of node-seconds, by policy."""
    accounts = (*comparison.accounts, comparison.oracle)
    colours = dict(zip((one.policy for one in comparison.accounts), _POLICIES, strict=False))
    end, most = crowd.end or 1.0, max(crowd.most, 1)
    steps = max((value for one in accounts for _, value in one.curve), default=0.0) or 1.0
    height = 48 + _NODES + _GAP + _STEPS + _GAP + len(accounts) * (_BAR + 8) + _GAP
    inner = _WIDTH - _LEFT - _RIGHT

    def x(at: float) -> float:
        return _LEFT + inner * at / end

    top = 48
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 22, title, size=15),
        _text(_LEFT - 8, top + 10, f"{most} nodes", anchor="end"),
        _text(_LEFT - 8, top + _NODES, "0", anchor="end"),
    ]
    held = [(at, nodes) for since, until, nodes in crowd.counts() for at in (since, until)]
    path = " ".join(f"{x(at):.1f},{top + _NODES - _NODES * nodes / most:.1f}" for at, nodes in held)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#444444" stroke-width="1.2"/>')

    top += _NODES + _GAP
    for tick in range(5):
        y = top + _STEPS - _STEPS * tick / 4
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{steps * tick / 4:,.0f}", anchor="end"))
        parts.append(_text(x(end * tick / 4), top + _STEPS + 18, f"{end * tick / 4 / 3600:.1f} h", anchor="middle"))
    parts.append(_text(_LEFT, top - 10, "steps that count"))
    for account in reversed(accounts):
        points = [(at, value) for at, value in account.curve if at <= end]
        path = " ".join(f"{x(at):.1f},{top + _STEPS - _STEPS * value / steps:.1f}" for at, value in _thinned(points))
        colour = colours.get(account.policy, _ORACLE)
        dashes = "" if account.policy in colours else ' stroke-dasharray="5 4"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')

    top += _STEPS + _GAP
    for account in accounts:
        name = f"{account.policy} {comparison.goodput(account):.3f}"
        parts.append(_text(_LEFT - 8, top + 15, name, anchor="end", fill=colours.get(account.policy, _ORACLE)))
        since = float(_LEFT)
        for spent, colour in _SPENT.items():
            width = inner * account.node_seconds[spent] / (account.held or 1.0)
            if width > 0.0:
                parts.append(
                    f'<rect x="{since:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" fill="{colour}">'
                    f"<title>{spent.value} {account.node_seconds[spent] / (account.held or 1.0):.2%}</title></rect>"
                )
            since += width
        top += _BAR + 8
    used = [spent for spent in _SPENT if any(account.node_seconds[spent] for account in accounts)]
    for place, spent in enumerate(used):
        at = _LEFT + place * inner / max(len(used), 1)
        parts.append(f'<rect x="{at:.1f}" y="{top + 10}" width="10" height="10" fill="{_SPENT[spent]}"/>')
        parts.append(_text(at + 14, top + 19, spent.value))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, fill: str = "#222222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'
    )


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return few enough of the points, the last among them."""
    every = max(1, len(points) // _POINTS)
    return [*points[::every], *points[-1:]]
