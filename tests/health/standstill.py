"""Ranks that run a program of operations until nothing moves any more, with one fault, and what they have recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic3d.health.phases import Axis
from elastic3d.health.waits import members
from elastic3d.membership.stalls import AxisCount, RankStall, RankState, Stall, Wait
from elastic3d.planner import place_of
from elastic3d.values import Cause, Generation, Layout, Node, Slot

Op = tuple[Axis, int]
"""An operation of a program: its axis and its fingerprint."""

ANSWER = {
    Axis.FROM_PREVIOUS: Axis.TO_NEXT,
    Axis.FROM_NEXT: Axis.TO_PREVIOUS,
}
STEPS = 3


def generation(layout: Layout, slots: int = 1) -> Generation:
    """Return a sealed generation of nodes with `slots` ranks each."""
    nodes = tuple(
        Node(name=f"n{number}", incarnation="1", address="h", slots=tuple(Slot(tile_port=1) for _ in range(slots)))
        for number in range(layout.world // slots)
    )
    return Generation(number=4, attempt=1, cause=Cause.START, nodes=nodes, layout=layout)


def program(layout: Layout, rank: int, micro_batches: int = 2) -> list[Op]:
    """Return what a rank posts in one step: forwards, backwards, the reduction, the vote."""
    pp = place_of(rank, layout).pp
    ops: list[Op] = []
    for batch in range(micro_batches):
        ops += [(Axis.FROM_PREVIOUS, 7)] * (pp > 0) + [(Axis.TO_NEXT, 7)] * (pp < layout.pp - 1)
        ops += [(Axis.TP, 30 + batch)] * (layout.tp > 1)
    for _ in range(micro_batches):
        ops += [(Axis.FROM_NEXT, 8)] * (pp < layout.pp - 1) + [(Axis.TO_PREVIOUS, 8)] * (pp > 0)
    if layout.dp > 1:
        ops += [(Axis.SHARD, 11), (Axis.SHARD, 12)] if layout.shards > 1 else []
        ops += [(Axis.REPLICA, 13)] if layout.replicas > 1 else []
    return [*ops, (Axis.WORLD, 21), (Axis.WORLD, 22)]


@dataclass(slots=True)
class Runner:
    """One rank: its whole program, where it is, and what it has posted. stands: the operation it never begins."""

    ops: list[tuple[int, Op]]
    stands: int = -1
    at: int = 0
    begun: bool = False
    posted: dict[Axis, int] = field(default_factory=dict)
    done: dict[Axis, int] = field(default_factory=dict)
    newest: dict[Axis, int] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.at == len(self.ops)

    def odd(self, steps: Sequence[Sequence[Op]]) -> str:
        """Return where the present step is no beginning of the one before, as the record's reader does."""
        step = self.ops[min(self.at, len(self.ops) - 1)][0]
        now = [op for number, op in self.ops[: self.at + self.begun] if number == step]
        before = list(steps[step - 1]) if step else now
        return "" if now == before[: len(now)] else f"operation {len(now)} of the step is {now[-1]}"


def standstill(
    layout: Layout, programs: Mapping[int, Sequence[Sequence[Op]]], stands: Mapping[int, int] | None = None
) -> dict[int, RankStall]:
    """Run all ranks' steps until nothing moves; return what each recorded. stands: by rank, where it does not go on."""
    runners = {
        rank: Runner(ops=[(number, op) for number, step in enumerate(steps) for op in step])
        for rank, steps in programs.items()
    }
    for rank, where in (stands or {}).items():
        runners[rank].stands = where
    while any(_go(runners, rank, layout) for rank in runners):
        pass
    return {rank: _stall(runners[rank], rank, programs[rank]) for rank in runners}


def _go(runners: Mapping[int, Runner], rank: int, layout: Layout) -> bool:
    own, moved = runners[rank], False
    while not own.over and own.at != own.stands:
        axis, fingerprint = own.ops[own.at][1]
        if not own.begun:
            own.begun = moved = True
            own.posted[axis] = own.posted.get(axis, 0) + 1
            own.newest[axis] = fingerprint
        if not _ends(runners, rank, axis, layout):
            break
        own.done[axis] = own.posted[axis]
        own.begun, own.at, moved = False, own.at + 1, True
    return moved


def _ends(runners: Mapping[int, Runner], rank: int, axis: Axis, layout: Layout) -> bool:
    own = runners[rank]
    number = own.posted[axis]
    if axis in (Axis.TO_NEXT, Axis.TO_PREVIOUS):
        return True
    if axis in ANSWER:
        (_, other) = members(axis, rank, layout)
        return runners[other].posted.get(ANSWER[axis], 0) >= number
    group = [runners[member] for member in members(axis, rank, layout)]
    if any(each.posted.get(axis, 0) < number for each in group):
        return False
    return len({each.newest[axis] for each in group if each.posted[axis] == number}) < 2


def _stall(own: Runner, rank: int, steps: Sequence[Sequence[Op]]) -> RankStall:
    waiting = own.begun and not own.over
    axis, fingerprint = own.ops[min(own.at, len(own.ops) - 1)][1]
    return RankStall(
        rank=rank,
        step=own.ops[min(own.at, len(own.ops) - 1)][0] + 40,
        made=STEPS,
        phase="vote" if waiting and axis is Axis.WORLD else "forward",
        silent=5_000,
        allowed_idle=3_000,
        allowed_busy=30_000,
        beat=100,
        state=RankState.IDLE,
        axes=tuple(
            AxisCount(axis=each.name, posted=own.posted[each], done=own.done.get(each, 0), fingerprint=own.newest[each])
            for each in sorted(own.posted)
        ),
        wait=Wait(axis=axis.name, number=own.posted[axis], fingerprint=fingerprint) if waiting else None,
        odd=own.odd(steps),
    )


def stalls(generation: Generation, ranks: Mapping[int, RankStall]) -> dict[str, Stall]:
    """Return what each node says."""
    said, first = {}, 0
    for node in generation.nodes:
        own = tuple(ranks[rank] for rank in range(first, first + len(node.slots)))
        said[node.id] = Stall(incarnation=node.incarnation, key=generation.key, ranks=own)
        first += len(node.slots)
    return said


def with_rank(ranks: Mapping[int, RankStall], rank: int, **changes: object) -> dict[int, RankStall]:
    """Return `ranks` with fields of one changed."""
    return {**ranks, rank: replace(ranks[rank], **changes)}  # type: ignore[arg-type]
