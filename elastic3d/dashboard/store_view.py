"""The checkpoints of a store as fragments of HTML, and the page of a comparison of two. Pure."""

from __future__ import annotations

from checkpointing.inspection.difference import Difference
from elastic3d.cli.ckpt.render.words import called, size, step
from elastic3d.dashboard.store_listing import StoredCheckpoint
from elastic3d.dashboard.store_reading import StoreSeen
from elastic3d.pages.markup import Html, ago, join, tag, text
from elastic3d.pages.template import style
from elastic3d.pages.tensors import comparison

_CLASSES = {"verified": "ok", "vetted": "ok", "latest": "spare", "distrusted": "bad"}

NOT_READ = "Not read: elastic3d dashboard --store URL lists the checkpoints with their lineage, and compares two."


def parts(seen: StoreSeen | None, now: float) -> dict[str, Html]:
    """Return the fragments: the table's rows, when the store was read, and what may be compared."""
    if seen is None:
        return {"store": _line(NOT_READ), "store_state": Html(""), "store_before": Html(""), "store_after": Html("")}
    listing = seen.listing
    rows = listing.checkpoints if listing is not None else ()
    shown = [_row(one) for one in rows]
    if listing is not None and listing.more:
        shown.append(_line("and older ones, which elastic3d ckpt ls lists"))
    if not rows:
        shown = [_line("Nothing was committed yet." if listing is not None else "Not read yet.")]
    return {
        "store": join(*shown),
        "store_state": _state(seen, now),
        "store_before": _options(rows, 1),
        "store_after": _options(rows, 0),
    }


def _line(words: str) -> Html:
    return tag("tr", tag("td", words, colspan=6))


def _state(seen: StoreSeen, now: float) -> Html:
    lines = [tag("p", seen.url, ": read ", ago(seen.read_at, now)) if seen.read_at else tag("p", seen.url)]
    if seen.waiting_since is not None:
        words = "The store does not answer; it was asked "
        lines.append(tag("p", words, ago(seen.waiting_since, now), ". What stands here may be old.", class_="wrong"))
    if seen.problem:
        lines.append(tag("p", f"It cannot be read: {seen.problem}. It is tried again.", class_="wrong"))
    return join(*lines)


def _row(one: StoredCheckpoint) -> Html:
    name = tag("th", step(one.checkpoint), scope="row", class_="number", title=one.checkpoint)
    if not one.read or one.error:
        return tag("tr", name, tag("td", one.error or "being read", colspan=4), tag("td", _marks(one)))
    made = str(one.made_in) if one.made_in == one.committed_in else f"{one.made_in}, committed by {one.committed_in}"
    return tag(
        "tr",
        name,
        tag("td", made, class_="number"),
        tag("td", one.ranks, class_="number"),
        tag("td", size(one.bytes), class_="number"),
        tag("td", called(one.parent) if one.parent is not None else "none: it stands for itself"),
        tag("td", _marks(one)),
        class_="bad" if "distrusted" in one.labels else None,
    )


def _marks(one: StoredCheckpoint) -> Html:
    return join(*(tag("span", label, class_=f"state {_CLASSES.get(label, 'coming')}") for label in one.labels))


def _options(rows: tuple[StoredCheckpoint, ...], chosen: int) -> Html:
    return join(
        *(
            tag("option", called(one.checkpoint), value=one.checkpoint, selected=number == chosen)
            for number, one in enumerate(rows)
        )
    )


def comparison_page(changes: Difference, nonce: str) -> str:
    """Return a page that stands for itself; the live page takes out of it what lies in "difference"."""
    body = tag("main", tag("section", tag("h1", "What changed"), tag("div", comparison(changes), id="difference")))
    back = Html('<p><a href="./">back to the job</a></p>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>What changed</title><style nonce="{text(nonce)}">{style()}</style></head>'
        f"<body>{body}{back}</body></html>"
    )
