"""What changed between two checkpoints, as HTML. Pure."""

from __future__ import annotations

import json
from typing import Any

from checkpointing.inspection.alike import gathered
from checkpointing.inspection.difference import Change, Difference, merged
from elastic3d.cli.ckpt.render.tensor_words import SIGN, amount, changed, common, counted, respecified, rms
from elastic3d.cli.ckpt.render.words import called, signed, size
from elastic3d.pages.markup import Html, join, tag

ROWS = 400
FACTS = 40
LONGEST = 200
"""Characters of a fact that are shown."""

_CLASS = {Change.RESHAPED: "bad", Change.REMOVED: "bad"}


def comparison(changes: Difference) -> Html:
    """Return what changed: tensors of repeated blocks that changed alike in one row, and facts."""
    heads = tag("p", "From ", tag("b", called(changes.before)), " to ", tag("b", called(changes.after)), ".")
    if changes.same:
        return join(heads, tag("p", "Tensors and facts are the same: both have one root."))
    unsure = bool(changes.unknown)
    total = f"{counted(changes)}; {amount(changes, unsure=unsure)}"
    if unsure:
        more = f"{size(changes.unknown)} cut elsewhere, which `elastic3d ckpt diff --values` compares"
        total = f"{total}, {more}"
    return join(heads, tag("p", total, "."), _tensors(changes), _facts(changes))


def _tensors(changes: Difference) -> Html:
    differing = {one.key: one for one in changes.tensors if one.change is not Change.SAME}
    if not differing:
        return Html("")
    rows = []
    groups = gathered((key, common(one)) for key, one in differing.items())
    for name, keys in groups[:ROWS]:
        one = merged([differing[key] for key in keys])
        tiles = f"{one.changed_tiles} of {one.tiles}" if one.change is Change.CHANGED and one.changed_tiles else ""
        rows.append(
            tag(
                "tr",
                tag("td", SIGN[one.change], title=str(one.change)),
                tag("th", name, respecified(one), scope="row"),
                tag("td", size(one.bytes), class_="number"),
                tag("td", changed(one), class_="number"),
                tag("td", tiles, class_="number"),
                tag("td", rms(one), class_="number"),
                tag("td", signed(one.drift), class_="number"),
                class_=_CLASS.get(one.change),
            )
        )
    columns = [("", ""), ("tensor", ""), *((name, "number") for name in ("size", "changed", "tiles", "rms", "drift"))]
    head = tag("tr", *(tag("th", name, scope="col", class_=kind or None) for name, kind in columns))
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    left_out = len(groups) - len(rows)
    note = tag("p", f"and {left_out:,} more, which `elastic3d ckpt diff` lists", class_="note") if left_out else ""
    return join(tag("div", table, class_="scroll", tabindex=0, role="region", aria_label="Tensors that changed"), note)


def _facts(changes: Difference) -> Html:
    if not changes.facts:
        return Html("")
    rows = [
        tag("li", tag("b", fact.path), f": {_value(fact.before)} → {_value(fact.after)}")
        for fact in changes.facts[:FACTS]
    ]
    if len(changes.facts) > FACTS:
        rows.append(tag("li", f"and {len(changes.facts) - FACTS} more"))
    return join(tag("p", "Facts that differ:"), tag("ul", *rows, class_="facts"))


def _value(value: Any) -> str:
    said = json.dumps(value, ensure_ascii=False)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}..."
