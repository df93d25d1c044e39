"""What every node of a layout waits for within its steps, from the rows of all ranks. Pure.

A step ends for all when it ends for the slowest, and what a rank waits for others has a reason that another rank's row
shows. So each second of a rank's waits goes to the first of these that explains it, and the rest stays with the step,
as transfers and the pipeline's idle time belong to the layout:

data    the wait for its own loader, and for the rank whose loader takes longest
saving  the wait for the copy of its own snapshot, and for the rank whose copy takes longest
slow    for the rank of one stage that takes longer than the fastest one for the same work: its passes, where neither
        their number nor their length explains it alone, and its updates

Rows are means over `sheet.EVERY` steps, and the mean of a step's longest time is no less than the longest mean: what is
said is at least what was waited. A place that a single rank holds is compared with nobody; `speeds` knows of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elastic3d.health import sheet
from elastic3d.health.sheet import StepSheet
from elastic3d.values import Generation, Layout

APART = 16
"""Nodes that are told of apart, at most: those that differ most from what most of them wait."""

ALIKE = 0.01
"""Share of a step by which a node may differ from the median, and not be told of apart."""

Waits = tuple[float, float, float]
"""Seconds of a step in which a node waits for data, for snapshots, and for slow ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWaits:
    """What the steps `first` to `last` were to the nodes of their generation. All times are seconds of one step.

    others: the mean of all nodes that are not in `apart`, by name.
    """

    first: int
    last: int
    others: Waits
    apart: Mapping[str, Waits]


class WaitsHeard:
    """Takes the rows of all steps, on every node alike."""

    def __init__(self) -> None:
        self._key = ""
        self._nodes: tuple[str, ...] = ()
        self._rows: dict[int, Sequence[float]] = {}

    def heard(self, step: int, rows: Iterable[Sequence[float]], generation: Generation) -> StepWaits | None:
        """Take the rows that rode in the vote of a step; return what they come to once all ranks have spoken.

        Rows of devices that are measured late are of a step earlier than is said here.
        """
        if generation.key != self._key:
            self._key, self._nodes = generation.key, tuple(node.name for node in generation.node_of_rank)
            self._rows = {}
        self._rows |= zip(sheet.speakers(step, len(self._nodes)), rows, strict=False)
        if step % sheet.EVERY or generation.layout is None:
            return None
        spoke, self._rows = self._rows, {}
        made = [spoke.get(rank, ()) for rank in range(len(self._nodes))]
        last = step - sheet.EVERY
        if last < sheet.EVERY or not all(map(sheet.is_row, made)):
            return None
        others, apart = _told(by_node(made, self._nodes, generation.layout), max(sum(row[2:12]) for row in made))
        return StepWaits(first=last - sheet.EVERY + 1, last=last, others=others, apart=apart)


def by_node(rows: Sequence[Sequence[float]], nodes: Sequence[str], layout: Layout) -> dict[str, Waits]:
    """Return what each node waits for, as the mean of its ranks. rows: of all ranks; nodes: of each rank, by name.

    Column by column, since there are thousands of ranks, and every keeper does it for all of them.
    """
    columns = dict(zip(StepSheet.__slots__, zip(*rows, strict=True), strict=True))
    data, copy = columns["data"], columns["copy"]
    behind = _behind(columns, layout)
    longest, slowest, most = max(data), max(copy), max(behind)
    sums: dict[str, list[float]] = {node: [0.0, 0.0, 0.0, 0.0] for node in nodes}
    waits = zip(columns["wait_dp"], columns["wait_pp"], columns["wait_other"], strict=True)
    for node, (dp, pp, other), own_data, own_copy, own_behind in zip(nodes, waits, data, copy, behind, strict=True):
        left = dp + pp + other
        for_data = min(left, longest - own_data)
        for_copy = min(left - for_data, slowest - own_copy)
        mine = sums[node]
        mine[0] += own_data + for_data
        mine[1] += own_copy + for_copy
        mine[2] += min(left - for_data - for_copy, most - own_behind)
        mine[3] += 1
    return {node: (data / ranks, copy / ranks, slow / ranks) for node, (data, copy, slow, ranks) in sums.items()}


def _behind(columns: Mapping[str, Sequence[float]], layout: Layout) -> list[float]:
    """Return how many seconds each rank takes longer than the fastest of its stage, for the same work."""
    passes = zip(columns["forward"], columns["backward"], columns["weights"], strict=True)
    busy, rounds, update = [sum(one) for one in passes], columns["rounds"], columns["update"]
    stage = layout.dp * layout.tp  # ranks of a stage are neighbours
    behind: list[float] = []
    for first in range(0, len(busy), stage):
        own = list(zip(busy[first : first + stage], rounds[first : first + stage], strict=True))
        updates = update[first : first + stage]
        least, each, quickest = min(busy[first : first + stage]), min(took / count for took, count in own), min(updates)
        behind += [
            max(0.0, min(took - least, took - each * count)) + longer - quickest
            for (took, count), longer in zip(own, updates, strict=True)
        ]
    return behind


def _told(waits: Mapping[str, Waits], step: float) -> tuple[Waits, dict[str, Waits]]:
    """Return what most nodes wait, and those that differ from it by more than a share of a step of so many seconds."""
    usual = [median(column) for column in zip(*waits.values(), strict=True)]
    away = {node: sum(abs(own - most) for own, most in zip(mine, usual, strict=True)) for node, mine in waits.items()}
    named = sorted((node for node in waits if away[node] > ALIKE * step), key=lambda node: (-away[node], node))[:APART]
    rest = [mine for node, mine in waits.items() if node not in named]
    return _mean(rest) if rest else (0.0, 0.0, 0.0), {node: waits[node] for node in named}


def _mean(waits: Sequence[Waits]) -> Waits:
    data, saving, slow = (sum(column) / len(waits) for column in zip(*waits, strict=True))
    return data, saving, slow
