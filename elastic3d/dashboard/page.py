"""The page as it is first sent: everything is in it already, and its script keeps it true. Pure, but for one file.

Nothing is loaded from anywhere: no font, no script, no picture.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from elastic3d.pages.curves import loss_plot, seconds_plot
from elastic3d.pages.markup import Html, join, tag, text
from elastic3d.pages.plots import plotted
from elastic3d.pages.template import filled, style


@functools.cache
def _template() -> str:
    return files("elastic3d.dashboard").joinpath("page.html").read_text(encoding="utf-8")


def policy(nonce: str) -> str:
    """Return the Content-Security-Policy: what stands in the page itself, and requests to where it came from."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'nonce-{nonce}'",
            f"style-src 'nonce-{nonce}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


def page(view: dict[str, Any], *, nonce: str, read_at: float, now: float, when: str, orders: bool) -> str:
    """Return the page with a view in it. when: `read_at` in words. now: this machine's wall clock."""
    rows = view["nodes"]["rows"]
    mesh = dict(view["mesh"])
    points = [point for _, chunk in sorted(view["series"].items(), key=lambda item: int(item[0])) for point in chunk]
    head = mesh.pop("head", Html(""))
    places: dict[str, str] = {
        "nonce": text(nonce),
        "style": style(),
        "title": text(view["title"]),
        "away": text(view["away"]),
        "away_hidden": "" if view["away"] else "hidden",
        "read_at": f"{read_at:.1f}",
        "now": f"{now:.3f}",
        "when": text(when),
        "nodes": join(*(Html(rows[key]) for key in view["nodes"]["order"])),
        "mesh_head": head,
        "mesh": join(*(Html(row) for row in mesh.values())),
        "mesh_hidden": "" if mesh else "hidden",
        "curve_loss": plotted(loss_plot(points, "still")),
        "curve_time": plotted(seconds_plot(points, "still")),
        "store_hidden": "" if view["parts"].get("store_before") else "hidden",
        "orders_head": tag("th", "orders", scope="col") if orders else "",
        **{f"part_{name}": part for name, part in view["parts"].items()},
    }
    return filled(_template(), places)


def plain_page(title: str, *lines: Html) -> str:
    """Return a page of some words, as for those who lack the token."""
    body = join(tag("h1", title), *(tag("p", line) for line in lines))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title></head>{body}</html>'
    )
