"""The rows of the page's tables: nodes, the mesh. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from elastic3d.cli.render import DOMAINS, clean
from elastic3d.dashboard.document import PageDocument
from elastic3d.membership.inspection.status import NodeRole, NodeState, NodeStatus
from elastic3d.pages.markup import Html, join, left, tag

CLASSES = {
    NodeState.ACTIVE: "ok",
    NodeState.FINISHED: "ok",
    NodeState.SPARE: "spare",
    NodeState.JOINING: "coming",
    NodeState.PREPARING: "coming",
    NodeState.PREPARED: "coming",
    NodeState.DRAINING: "leaving",
    NodeState.QUARANTINED: "leaving",
    NodeState.DOUBTED: "leaving",
    NodeState.GONE: "gone",
}
"""The class of a state; those that are not here are bad."""

NAMED = 24
"""Columns of the mesh up to which its cells show names."""

ORDERS = {"drain": "Drain", "quarantine": "Quarantine", "release": "Release"}


def kind(state: NodeState | None) -> str:
    """Return the class by which a state is coloured."""
    return "bad" if state is None else CLASSES.get(state, "bad")


def key_of(node: NodeStatus) -> str:
    """Return what names a node's row, as the page's script finds it in the row's attribute."""
    return clean(f"{node.name}@{node.incarnation}")


def node_row(node: NodeStatus, until: float | None, now: float, *, orders: bool) -> Html:
    """Return a node's row. until: when its drain or quarantine ends. orders: with buttons to give orders."""
    time_left = join(", ", left(until, now)) if until is not None else ""
    state = tag("span", str(node.state), class_=f"state {kind(node.state)}")
    wrong = "; ".join(filter(None, (node.detail, *node.health)))
    health = tag("span", wrong, class_="wrong") if wrong else ("ok" if node.pulse is not None else "")
    cells = [
        tag("th", node.name, tag("small", " leads") if node.leads else "", scope="row"),
        tag("td", state, time_left),
        tag("td", ranks(node), class_="number"),
        tag("td", node.slots or "", class_="number"),
        tag("td", labels(node.labels), class_="wide"),
        tag("td", health, class_="text"),
    ]
    if orders:
        cells.append(tag("td", *_buttons(node), class_="orders"))
    noted = " noted" if wrong or kind(node.state) not in ("ok", "spare") else ""
    return tag("tr", *cells, data_key=key_of(node), class_=f"{kind(node.state)}{noted}")


def _buttons(node: NodeStatus) -> Iterator[Html]:
    for order, word in ORDERS.items():
        if order == "release" or node.state is not NodeState.GONE:
            name = f"{word} {node.name}"
            number = f"{order}-{key_of(node)}"
            yield tag("button", word, type="button", id=number, data_order=order, data_node=node.name, aria_label=name)


def ranks(node: NodeStatus) -> str:
    """Return a node's ranks, in words."""
    if node.role is NodeRole.SPARE:
        return "spare"
    if node.first_rank is None:
        return ""
    last = node.first_rank + node.slots - 1
    return str(node.first_rank) if last <= node.first_rank else f"{node.first_rank}-{last}"


def labels(of: Mapping[str, str]) -> str:
    """Return labels from the widest domain to the narrowest."""
    order = sorted(of, key=lambda name: (DOMAINS.index(name) if name in DOMAINS else len(DOMAINS), name))
    return " ".join(f"{name}={of[name]}" for name in order)


def mesh(document: PageDocument) -> dict[str, Html]:
    """Return the rows of the mesh by number of the stage, under "head" the row above them, {} without a layout.

    Equal neighbours are one cell: the replicas that a node with several slots holds.
    """
    generation = document.status.generation
    if generation is None or not generation.mesh:
        return {}
    states = {node.name: node.state for node in document.status.nodes}
    wide = len(generation.mesh[0])
    named = len(_spans(generation.mesh[0])) <= NAMED
    rows = {"head": tag("tr", tag("th", "stage", scope="col"), *_heads(wide))}
    for stage, row in enumerate(generation.mesh):
        cells = [_cell(row[first], stop - first, states.get(row[first]), named=named) for first, stop in _spans(row)]
        rows[str(stage)] = tag("tr", tag("th", f"pp {stage}", scope="row"), *cells, data_key=str(stage))
    return rows


def _heads(wide: int) -> list[Html]:
    if wide > NAMED:
        return [tag("th", f"dp 0 to {wide - 1}", scope="colgroup", colspan=wide)]
    return [tag("th", f"dp {column}", scope="col") for column in range(wide)]


def _spans(row: tuple[str, ...]) -> list[tuple[int, int]]:
    starts = [0, *(at for at in range(1, len(row)) if row[at] != row[at - 1])]
    return list(zip(starts, [*starts[1:], len(row)], strict=True))


def _cell(name: str, span: int, state: NodeState | None, *, named: bool) -> Html:
    said = str(state) if state is not None else "out"
    shown = [name] if named else []
    if kind(state) != "ok":
        shown.append(f" {said}" if named else "!")
    return tag(
        "td",
        tag("span", *shown[:1], tag("small", *shown[1:]) if len(shown) > 1 else "", class_=f"cell {kind(state)}"),
        colspan=span if span > 1 else None,
        title=None if named and kind(state) == "ok" else f"{name}: {said}",
        aria_label=None if named else f"{name}: {said}",
    )


def outside(document: PageDocument) -> Html:
    """Return the nodes that the mesh does not show: spares, newcomers, those that are kept out."""
    status = document.status
    inside = {name for row in status.generation.mesh for name in row} if status.generation is not None else set()
    others = [node for node in status.nodes if node.name not in inside]
    shown = others[:200]
    cells = [
        tag("li", tag("span", node.name, tag("small", f" {node.state}"), class_=f"cell {kind(node.state)}"))
        for node in shown
    ]
    more = tag("li", f"and {len(others) - len(shown)} more") if len(others) > len(shown) else ""
    return tag("ul", *cells, more, class_="cells") if others else Html("")
