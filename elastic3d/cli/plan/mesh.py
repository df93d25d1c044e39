"""A drawing of the place in a layout that each slot of each node holds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.planner.placement import RankPlace, place_of
from elastic3d.values import Layout

ROWS = 12
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def mesh(layout: Layout, slots: int, spares: int, width: int) -> RenderableType:
    """Draw nodes as rows and their slots as columns; nodes that hold runs of one stage are drawn together.

    If not all slots fit the width, a node is one line of ranges.
    """
    nodes = layout.world // slots
    names = [axis for axis in ("pp", "dp", "cp", "tp") if getattr(layout, axis) > 1]
    held = [[place_of(node * slots + slot, layout) for slot in range(slots)] for node in range(nodes)]
    cells = [[_name(place, names) for place in places] for places in held]
    label = len(f"node {nodes - 1}")
    wide = max(len(cell) for row in cells for cell in row) + 2
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    if nodes <= ROWS and label + 4 + wide * slots <= width:
        for node, row in enumerate(cells):
            table.add_row(f"  node {node}", *(_coloured(cell, held[node][i]) for i, cell in enumerate(row)))
    else:
        for first, stop in _runs(held):
            together = [place for places in held[first:stop] for place in places]
            which = f"  node {first}" if stop - first == 1 else f"  nodes {first}-{stop - 1}"
            table.add_row(which, _coloured(_ranges(together, names), together[0]))
    parts: list[RenderableType] = [table]
    if spares:
        which = f"node {nodes}" if spares == 1 else f"nodes {nodes}-{nodes + spares - 1}"
        parts.append(Text(f"  {which}  hot spare{'' if spares == 1 else 's'}", style="dim"))
    return Group(*parts)


def _name(place: RankPlace, names: Sequence[str]) -> str:
    return " ".join(f"{axis[0]}{getattr(place, axis)}" for axis in names) or "all"


def _ranges(places: Sequence[RankPlace], names: Sequence[str]) -> str:
    """Return the places of one or more nodes as a range on each axis."""
    said = []
    for axis in names:
        on = [getattr(place, axis) for place in places]
        low, high = min(on), max(on)
        said.append(f"{axis} {low}" if low == high else f"{axis} {low}-{high}")
    return "  ".join(said) or "the whole model on each slot"


def _runs(held: Sequence[Sequence[RankPlace]]) -> list[tuple[int, int]]:
    """Return half-open runs of nodes whose slots all hold the same stage, at most ROWS: longer ones where more."""
    starts = [0]
    for node in range(1, len(held)):
        if _stages(held[node]) != _stages(held[node - 1]) or len(_stages(held[node])) > 1:
            starts.append(node)
    if len(starts) > ROWS:
        step = -(-len(starts) // ROWS)
        starts = starts[::step]
    return list(zip(starts, [*starts[1:], len(held)], strict=True))


def _stages(places: Sequence[RankPlace]) -> set[int]:
    return {place.pp for place in places}


def _coloured(text: str, place: RankPlace) -> Text:
    return Text(text, style=COLOURS[place.pp % len(COLOURS)])
