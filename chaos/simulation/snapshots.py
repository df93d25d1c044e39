"""Which node holds which step in memory: at home, at the buddy, and where a leaving node has its snapshots copied to.

Every step is a snapshot. Its copy is at the buddy when the next step ends, or some steps later, or, for the step at
whose boundary the trainers leave, before that is reported. The production code decides where a copy is kept. A
generation resumes from the newest step of which the whole state is at present nodes. Ranks of several replicas hold the
same parts of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from elastic3d.distrust import Distrust, refused
from elastic3d.membership.topology import buddies
from elastic3d.planner.placement import RankPlace, place_of
from elastic3d.values import Generation, Layout, Node
from elastic3d.worker.keeper import departure

Part = tuple[int, ...]
"""Where a part of the state belongs: its place in the pipeline, among the shards, and among the tp ranks."""


@dataclass(slots=True)
class _Taken:
    """The snapshots of one generation. last: the newest step. first: the step it began behind. behind: steps by which
    the buddies' copies are older.

    copies: by node, where the copy of its newest snapshot is, if not where it was before: at the buddy, older by that.
    parts: by node, which parts of the state its ranks hold.
    """

    generation: Generation
    buddies: tuple[int, ...]
    parts: tuple[frozenset[Part], ...]
    first: int
    last: int
    behind: int
    copies: dict[int, str] = field(default_factory=dict)


class Snapshots:
    """Those of a whole job."""

    def __init__(self) -> None:
        self._taken: dict[str, _Taken] = {}
        self._before: dict[str, tuple[str, ...]] = {}

    def began(self, generation: Generation, step: int, behind: int = 1) -> None:
        """A generation resumes after this step. behind: steps by which its buddies' copies are to be older."""
        if generation.nodes:
            kept = buddies(generation.nodes)
            parts = parts_of(generation)
            taken = _Taken(generation=generation, buddies=kept, parts=parts, first=step, last=step, behind=behind)
            self._taken[generation.key] = taken

    def stepped(self, generation: Generation, step: int) -> None:
        """A generation made a step."""
        taken = self._taken.get(generation.key)
        if taken is None:
            return  # one that the others went on without
        taken.last = step
        # A copy of one of its own steps is everywhere: it needs none of the generations before.
        if taken.last - taken.first == taken.behind + 1:
            for key in [key for key in self._taken if key != generation.key]:
                del self._taken[key]

    def holder(self, generation: Generation, at: int, to_come: Generation | None) -> Node:
        """Return the node that is to hold the copy of the `at`th node's snapshots; itself means none."""
        me = generation.nodes[at]
        buddy = generation.nodes[buddies(generation.nodes)[at]]
        if to_come is None:
            return buddy
        return departure.refuge(me, buddy if buddy.id != me.id else None, generation, to_come) or buddy

    def copied(self, generation: Generation, at: int, holder: Node) -> None:
        """The newest snapshot of the `at`th node is at `holder` as well."""
        taken = self._taken.get(generation.key)
        if taken is not None:
            taken.copies[at] = holder.id

    def inherited(self, id: str, by: str) -> None:
        """A process continues under another incarnation and keeps its snapshots."""
        self._before[by] = (*self._before.get(id, ()), id)

    def newest(self, servers: Sequence[str], rules: Sequence[Distrust] = ()) -> tuple[int, int]:
        """Return the newest step that is whole at these incarnations and their earlier ones, and in which generation it
        was made, (0, 0) for none. rules: of states that nobody goes on from.
        """
        there = {*servers, *(before for id in servers for before in self._before.get(id, ()))}
        whole = [(self._whole(taken, there), taken.generation.number) for taken in self._taken.values()]
        return max([(step, made) for step, made in whole if not refused(rules, made, step)], default=(0, 0))

    def _whole(self, taken: _Taken, there: Container[str]) -> int:
        nodes = taken.generation.nodes
        if taken.last == taken.first:
            return 0

        def step(at: int) -> int:
            if nodes[at].id in there or taken.copies.get(at, "") in there:
                return taken.last
            # The first step's own copy may not have been anywhere yet.
            older = taken.last - taken.behind
            return older if nodes[taken.buddies[at]].id in there and older > taken.first else 0

        newest: dict[Part, int] = {}
        for at, parts in enumerate(taken.parts):
            held = step(at)
            for part in parts:
                newest[part] = max(held, newest.get(part, 0))
        return min(newest.values())


def parts_of(generation: Generation) -> tuple[frozenset[Part], ...]:
    """Return, for each node, the parts of the state that its ranks hold; without a layout each rank has its own."""
    layout, ranks = generation.layout, itertools.count()
    return tuple(
        frozenset(
            (rank,) if layout is None else part_of(place_of(rank, layout), layout)
            for rank in itertools.islice(ranks, len(node.slots))
        )
        for node in generation.nodes
    )


def part_of(place: RankPlace, layout: Layout) -> Part:
    """Return which part of the state the rank at this place holds: a shard of a pipeline rank's, of its tp part."""
    return place.pp, (place.dp * layout.cp + place.cp) % layout.shards, place.tp
