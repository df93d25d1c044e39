"""Who waits for whom, from what silent ranks recorded: pure functions of a layout and their counts.

A rank that waits for the n-th operation of a group waits for those members that have posted fewer than n; one that
waits to receive, for its neighbour's n-th send, and the other way round. Where nobody has posted fewer, the operation
itself does not end: that is the network, or operations that do not fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic3d.health.phases import Axis
from elastic3d.membership.stalls import RankStall
from elastic3d.planner import place_of
from elastic3d.values import Layout

# The axis on which a neighbour in the pipeline answers, and whether that neighbour is the next one.
_ANSWERS: dict[Axis, tuple[Axis, bool]] = {
    Axis.TO_NEXT: (Axis.FROM_PREVIOUS, True),
    Axis.FROM_NEXT: (Axis.TO_PREVIOUS, True),
    Axis.TO_PREVIOUS: (Axis.FROM_NEXT, False),
    Axis.FROM_PREVIOUS: (Axis.TO_NEXT, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation that ranks wait for. number: counted from 1. members: who takes part, in order of ranks.

    Of a receive or a send, `members` are its two ends, the one that waits first.
    """

    axis: Axis
    number: int
    members: tuple[int, ...]

    @property
    def between_two(self) -> bool:
        """Whether it is a send or a receive of a pipeline."""
        return self.axis in _ANSWERS

    def __str__(self) -> str:
        return f"{self.axis.name.lower()} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitGraph:
    """Who waits for what, and who is missing there.

    waits: the operation that each waiting rank waits for. behind: by operation, the members that have not posted it.
    """

    waits: Mapping[int, Operation]
    behind: Mapping[Operation, tuple[int, ...]]

    def waited_for(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` waits for; () if it waits for none."""
        return self.behind[self.waits[rank]] if rank in self.waits else ()

    def unexplained(self) -> tuple[int, ...]:
        """Return the ranks that wait for an operation that all its members have posted."""
        return tuple(sorted(rank for rank, operation in self.waits.items() if not self.behind[operation]))

    def cycle(self) -> tuple[int, ...]:
        """Return ranks of which each waits for the next and the last for the first; () if there are none.

        Where every rank waits for one that is behind there is such a cycle.
        """
        settled: set[int] = set()
        for start in sorted(self.waits):
            path: dict[int, int] = {}
            rank = start
            while rank in self.waits and rank not in settled:
                if rank in path:
                    ring = list(path)[path[rank] :]
                    first = ring.index(min(ring))
                    return (*ring[first:], *ring[:first])
                path[rank] = len(path)
                missing = self.waited_for(rank)
                # One that waits itself leads on; one that does not ends the path.
                rank = next((m for m in missing if m in self.waits), -1)
            settled.update(path)
        return ()

    def lines(self, limit: int, names: Mapping[int, str]) -> tuple[str, ...]:
        """Return one line for each waiting rank, at most `limit`; names: of the node that has a rank."""
        said = []
        for rank in sorted(self.waits)[:limit]:
            operation = self.waits[rank]
            missing = self.behind[operation]
            whom = _listed(missing or operation.members, names)
            said.append(
                f"rank {rank} of {names[rank]} waits in {operation} for "
                + (whom if missing else f"nobody: all of {whom} posted it")
            )
        return (*said, *([f"and {len(self.waits) - limit} more"] if len(self.waits) > limit else []))


def members(axis: Axis, rank: int, layout: Layout) -> tuple[int, ...]:
    """Return who takes part in an operation of `rank` on `axis`, as in `Operation`.

    Collectives of the script's own are taken to be the world's: what else they may be is not known here.
    """
    if axis in (Axis.WORLD, Axis.USER):
        return tuple(range(layout.world))
    place = place_of(rank, layout)
    if axis in _ANSWERS:
        other = (place.pp + (1 if _ANSWERS[axis][1] else -1)) % layout.pp
        return (rank, rank + (other - place.pp) * layout.stage_ranks)
    if axis is Axis.TP:
        first = rank - place.tp
        return tuple(range(first, first + layout.tp))
    # Shards of one copy are cut over dp and cp; ranks that have the same chunks meet on dp.
    places, shards = layout.dp * layout.cp, layout.shards
    copy, shard = divmod(place.dp * layout.cp + place.cp, shards)
    match axis:
        case Axis.SHARD:
            columns = range(copy * shards, (copy + 1) * shards)
        case Axis.REPLICA:
            columns = range(shard, places, shards)
        case Axis.CP:
            columns = range(place.dp * layout.cp, (place.dp + 1) * layout.cp)
        case _:
            columns = range(place.cp, places, layout.cp)
    return tuple((place.pp * places + column) * layout.tp + place.tp for column in columns)


def posted(rank: RankStall, axis: Axis) -> int:
    """Return how many operations of `axis` a rank has posted."""
    return next((count.posted for count in rank.axes if count.axis.lower() == axis.name.lower()), 0)


def done(rank: RankStall, axis: Axis) -> int:
    """Return how many operations of `axis` a rank has seen done."""
    return next((count.done for count in rank.axes if count.axis.lower() == axis.name.lower()), 0)


def newest_fingerprint(rank: RankStall, axis: Axis) -> int:
    """Return the fingerprint of the operation of `axis` that a rank posted last, 0 if it has none."""
    return next((count.fingerprint for count in rank.axes if count.axis.lower() == axis.name.lower()), 0)


def wait_graph(layout: Layout, ranks: Mapping[int, RankStall]) -> WaitGraph:
    """Return who waits for whom among all ranks of `layout`.

    Edges are kept by operation rather than by pair: ten thousand ranks that wait for one have one row.
    """
    waits: dict[int, Operation] = {}
    behind: dict[Operation, tuple[int, ...]] = {}
    groups: dict[tuple[Axis, int, tuple[int, ...]], Operation] = {}
    same: dict[tuple[Axis, int], tuple[int, ...]] = {}
    for number, rank in sorted(ranks.items()):
        if rank.wait is None:
            continue
        axis = Axis[rank.wait.axis.upper()]
        taking_part = same.get((axis, number))
        if taking_part is None:
            taking_part = members(axis, number, layout)
            if axis not in _ANSWERS:
                same.update(((axis, member), taking_part) for member in taking_part)
        key = (axis, rank.wait.number, taking_part[:1] if axis not in _ANSWERS else taking_part)
        operation = groups.get(key)
        if operation is None:
            operation = groups[key] = Operation(axis=axis, number=rank.wait.number, members=taking_part)
            answer = _ANSWERS[axis][0] if axis in _ANSWERS else axis
            behind[operation] = tuple(
                member
                for member in taking_part
                if member != number and posted(ranks[member], answer) < rank.wait.number
            )
        waits[number] = operation
    return WaitGraph(waits=waits, behind=behind)


def _listed(ranks: tuple[int, ...], names: Mapping[int, str], limit: int = 8) -> str:
    said = ", ".join(f"rank {rank} of {names[rank]}" for rank in ranks[:limit])
    return f"{said} and {len(ranks) - limit} more" if len(ranks) > limit else said
