"""The rows of the table of nodes: what is known of each, and in which order they stand. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from elastic3d.cli.ckpt.render.words import size
from elastic3d.cli.durations import spell
from elastic3d.cli.render import called, clean, health_of, ranks_of, state_of
from elastic3d.dashboard.document import PageDocument
from elastic3d.membership.inspection.status import NodeState, NodeStatus
from elastic3d.membership.records import GenerationHistory

Order = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node. place: among all, as the status has them.

    speed: of its work, 1.0 where it is not slow, None where nobody measures it. changed: the newest generation that it
    came with or left in, None where none is known.
    """

    node: NodeStatus
    place: int
    speed: float | None
    changed: GenerationHistory | None

    @property
    def busy(self) -> float | None:
        """The share of a step in which it computes, None where that is not known."""
        pulse = self.node.pulse
        return pulse.busy if pulse is not None and 0 <= pulse.busy <= 1 else None

    @property
    def snapshot(self) -> float | None:
        """Seconds since its newest snapshot, as it reported them; None for none."""
        pulse = self.node.pulse
        return pulse.snapshot_age if pulse is not None and pulse.snapshot_age >= 0 else None

    @property
    def memory(self) -> int | None:
        """Bytes of its processes in the host's memory, None where that is not known."""
        pulse = self.node.pulse
        return pulse.memory if pulse is not None and pulse.memory > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of the table. order: by which rows may stand, () for one that stands last. right: figures stand so.

    matters: where there is not room for all columns, those with smaller numbers come first.
    """

    name: str
    cell: Callable[[NodeRow], Text]
    order: Callable[[NodeRow], Order]
    matters: int
    right: bool = False


def node_rows(document: PageDocument) -> list[NodeRow]:
    """Return the rows, active nodes first, in rank order."""
    status = document.status
    slow = {one.node: 1 / one.rho for one in status.health.slow if one.rho > 0} if status.health is not None else {}
    measured = status.health is not None and status.health.slow_from > 0
    changed: dict[str, GenerationHistory] = {}
    for history in document.generations:  # the newest first
        for name in (*history.joined, *history.left):
            changed.setdefault(name, history)
    return [
        NodeRow(
            node=node,
            place=place,
            speed=slow.get(node.name, 1.0 if measured and node.first_rank is not None else None),
            changed=changed.get(node.name),
        )
        for place, node in enumerate(status.nodes)
    ]


def in_order(rows: Sequence[NodeRow], column: Column, *, reverse: bool) -> list[NodeRow]:
    """Return rows by a column; those without a value stand last, whichever way."""
    known = [row for row in rows if column.order(row) != ()]
    return [
        *sorted(known, key=lambda row: (column.order(row), row.place), reverse=reverse),
        *(row for row in rows if column.order(row) == ()),
    ]


def _natural(name: str) -> Order:
    """Return what orders node2 before node10."""
    return tuple((1, int(part)) if part.isdecimal() else (0, part) for part in re.split(r"([0-9]{1,18})", name) if part)


def _value(value: float | None) -> Order:
    return () if value is None or not math.isfinite(value) else (value,)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _caused(row: NodeRow) -> str:
    return "-" if row.changed is None else f"{row.changed.cause} ({row.changed.number})"


_STATES = list(NodeState)


def _words(row: NodeRow) -> str:
    """Return what is wrong with a node, "" for nothing."""
    said = health_of(row.node).plain
    return "" if said == "ok" else said


COLUMNS: tuple[Column, ...] = (
    Column(
        name="ranks",
        cell=lambda row: Text(ranks_of(row.node)),
        order=lambda row: (row.place,),
        matters=4,
        right=True,
    ),
    Column(name="node", cell=lambda row: called(row.node), order=lambda row: _natural(row.node.name), matters=0),
    Column(
        name="state",
        cell=lambda row: state_of(row.node),
        order=lambda row: (_STATES.index(row.node.state),),
        matters=1,
    ),
    Column(
        name="slots",
        cell=lambda row: Text(str(row.node.slots) if row.node.slots else "-"),
        order=lambda row: (row.node.slots,),
        matters=6,
        right=True,
    ),
    Column(
        name="speed",
        cell=lambda row: Text(_share(row.speed), style="yellow" if row.speed is not None and row.speed < 1 else ""),
        order=lambda row: _value(row.speed),
        matters=3,
        right=True,
    ),
    Column(
        name="busy",
        cell=lambda row: Text(_share(row.busy)),
        order=lambda row: _value(row.busy),
        matters=5,
        right=True,
    ),
    Column(
        name="snapshot",
        cell=lambda row: Text("-" if row.snapshot is None else spell(row.snapshot)),
        order=lambda row: _value(row.snapshot),
        matters=7,
        right=True,
    ),
    Column(
        name="memory",
        cell=lambda row: Text("-" if row.memory is None else size(row.memory)),
        order=lambda row: _value(row.memory),
        matters=8,
        right=True,
    ),
    Column(
        name="last cause",
        cell=lambda row: Text(clean(_caused(row))),
        order=lambda row: () if row.changed is None else (row.changed.number,),
        matters=9,
    ),
    Column(
        name="health",
        cell=lambda row: health_of(row.node),
        order=lambda row: (_words(row),) if _words(row) else (),
        matters=2,
    ),
)
"""All columns; the first orders the rows unless one chooses another."""

HEALTH = COLUMNS[-1]
LEAST, MOST = 12, 24
"""Characters that the column of words has at least, and any other at most."""


def fitting(rows: Sequence[NodeRow], width: int, *, mark: int = 1) -> dict[str, int]:
    """Return the columns for which there is room, in order, with their widths. mark: width of what marks the order."""
    chosen: dict[str, int] = {}
    room = width
    for column in sorted(COLUMNS, key=lambda column: column.matters):
        longest = max((cell_len(column.cell(row).plain) for row in rows), default=0)
        needed = LEAST if column is HEALTH else min(MOST, max(longest, len(column.name) + mark))
        if room >= needed or not chosen:
            chosen[column.name] = min(needed, room)
            room -= needed + GAP
    if HEALTH.name in chosen:
        chosen[HEALTH.name] += max(0, room + GAP)
    return {column.name: chosen[column.name] for column in COLUMNS if column.name in chosen}


GAP = 2
"""Characters between two columns."""
