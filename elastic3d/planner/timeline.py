"""When each pipeline rank computes which micro-batch: what a schedule comes to, for somebody who looks at it.

Schedules without a split backward follow the orders of torch.distributed.pipelining (GPipe; 1F1B; interleaved 1F1B of
Narayanan et al. 2021). Those that split it (zero bubble, ZBV, DualPipeV: Qi et al. 2023 and 2024) are drawn as their
rule has it: gradients of inputs first, then forwards while memory lasts, gradients of weights whenever there is nothing
else. Times are of a pipeline of equal stages, without communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.planner.schedules import rank_of_stage, schedule_of, stages_of_rank
from elastic3d.values import Layout, Schedule

MOST = 8_000
"""Computations that are laid out one by one; of longer steps the beginning and the end, with an equal middle."""


class Pass(StrEnum):
    """What is computed of a micro-batch on a stage. BACKWARD is both gradients at once; INPUT and WEIGHT are one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One computation on one pipeline rank, from `start` to `end`, in forwards of a whole rank's blocks."""

    kind: Pass
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What each pipeline rank does, in order. micro_batches: that are laid out, of `of` that there are.

    bubble: part of the ranks' time in which they wait, of all micro-batches.
    """

    ranks: tuple[tuple[Work, ...], ...]
    micro_batches: int
    of: int
    bubble: float

    @property
    def span(self) -> float:
        """Time from the first computation to the end of the last."""
        return max(works[-1].end for works in self.ranks)


def timeline(layout: Layout, micro_batches: int, *, backward: float = 2.0) -> Timeline:
    """Return the timeline of one step of a layout whose pipelines run `micro_batches` each.

    backward: time of a backward in forwards; 3 with full recomputation.
    """
    laid = micro_batches
    if 2 * micro_batches * layout.stages > MOST:
        # Whole turns of interleaved schedules, and enough of them for the middle to be steady.
        least = 2 if layout.virtual > 1 else 1
        laid = min(micro_batches, layout.pp * max(least, MOST // (2 * layout.stages * layout.pp)))
    ranks = _laid(layout, laid, backward)
    span = max(works[-1].end for works in ranks)
    busy = laid * (1.0 + backward)
    idle = span - busy
    return Timeline(
        ranks=tuple(ranks),
        micro_batches=laid,
        of=micro_batches,
        bubble=idle / (idle + micro_batches * (1.0 + backward)),
    )


def _laid(layout: Layout, count: int, backward: float) -> list[tuple[Work, ...]]:
    schedule = schedule_of(layout)
    if schedule is None:
        return [tuple(_alone(count, backward))]
    if schedule.splits_backward:
        return _greedy(layout, count, backward)
    return _ordered(layout, count, backward, schedule)


def _alone(count: int, backward: float) -> Iterator[Work]:
    for index in range(count):
        start = index * (1.0 + backward)
        yield Work(kind=Pass.FORWARD, stage=0, micro_batch=index, start=start, end=start + 1.0)
        yield Work(kind=Pass.BACKWARD, stage=0, micro_batch=index, start=start + 1.0, end=start + 1.0 + backward)


Key = tuple[bool, int, int]  # forward, stage, micro-batch


def _ordered(layout: Layout, count: int, backward: float, schedule: Schedule) -> list[tuple[Work, ...]]:
    """Let each rank do its fixed order of passes, each as soon as what it needs is there."""
    orders = [deque(_order(layout, count, schedule, rank)) for rank in range(layout.pp)]
    free = [0.0] * layout.pp
    done: dict[Key, float] = {}
    works: list[list[Work]] = [[] for _ in orders]
    while any(orders):
        before = len(done)
        for rank, order in enumerate(orders):
            while order:
                key = order[0]
                ready = _ready(key, layout.stages, done)
                if ready is None:
                    break
                order.popleft()
                forward, stage, micro_batch = key
                start = max(free[rank], ready)
                free[rank] = done[key] = start + (1.0 if forward else backward) / layout.virtual
                kind = Pass.FORWARD if forward else Pass.BACKWARD
                works[rank].append(Work(kind=kind, stage=stage, micro_batch=micro_batch, start=start, end=free[rank]))
        assert len(done) > before, f"{layout}: the order of its passes goes round in a circle"
    return [tuple(own) for own in works]


def _ready(key: Key, stages: int, done: dict[Key, float]) -> float | None:
    """Return when what a pass needs is there, None while that is not known."""
    forward, stage, micro_batch = key
    if forward:
        return 0.0 if stage == 0 else done.get((True, stage - 1, micro_batch))
    own = done.get((True, stage, micro_batch))
    after = 0.0 if stage == stages - 1 else done.get((False, stage + 1, micro_batch))
    return None if own is None or after is None else max(own, after)


def _order(layout: Layout, count: int, schedule: Schedule, rank: int) -> Iterator[Key]:
    """Yield a rank's passes in order."""
    pp, virtual = layout.pp, layout.virtual
    turn = count // max(1, count // pp) if schedule is Schedule.INTERLEAVED else count
    total = count * virtual
    if schedule is Schedule.GPIPE:
        warm = total
    elif schedule is Schedule.INTERLEAVED:
        warm = min(total, (virtual - 1) * turn + 2 * (pp - 1 - rank))
    else:
        warm = min(total, pp - 1 - rank)

    def forward(number: int) -> Key:
        group, within = divmod(number, turn * virtual)
        return True, within // turn * pp + rank, group * turn + within % turn

    def backward(number: int) -> Key:
        group, within = divmod(number, turn * virtual)
        return False, (virtual - 1 - within // turn) * pp + rank, group * turn + within % turn

    yield from map(forward, range(warm))
    for number in range(total - warm):
        yield forward(warm + number)
        yield backward(number)
    yield from map(backward, range(total - warm, total))


Choice = tuple[float, int, int, int, Pass]  # start, preference, stage from the last, micro-batch, what


def _greedy(layout: Layout, count: int, backward: float) -> list[tuple[Work, ...]]:
    """Let each rank take what its rule prefers of all it could begin, at the moment it is free."""
    shares = {Pass.FORWARD: 1.0, Pass.INPUT: backward / 2, Pass.WEIGHT: backward / 2}
    rule = _Rule(layout, count)
    works: list[list[Work]] = [[] for _ in range(layout.pp)]
    choices = [rule.choice(rank) for rank in range(layout.pp)]
    for _ in range(3 * layout.stages * count):
        choice, rank = min((choice, rank) for rank, choice in enumerate(choices) if choice is not None)
        start, _, turned, micro_batch, kind = choice
        stage = layout.stages - 1 - turned
        end = start + shares[kind] / layout.virtual
        works[rank].append(Work(kind=kind, stage=stage, micro_batch=micro_batch, start=start, end=end))
        for touched in rule.take(rank, kind, stage, micro_batch, end):
            choices[touched] = rule.choice(touched)
    return [tuple(own) for own in works]


class _Rule:
    """What ranks may begin while a split schedule goes on."""

    def __init__(self, layout: Layout, count: int) -> None:
        self._layout, self._count = layout, count
        self._own = [stages_of_rank(layout, rank) for rank in range(layout.pp)]
        self._free = [0.0] * layout.pp
        self._forwards, self._inputs = [0] * layout.stages, [0] * layout.stages
        self._weights: list[deque[tuple[int, int]]] = [deque() for _ in range(layout.pp)]
        self._held = [0] * layout.pp  # micro-batches that entered a rank and have not left it
        self._done: dict[Key, float] = {}

    def choice(self, rank: int) -> Choice | None:
        """Return what a rank begins next: the earliest; of equals gradients of inputs, then late stages."""
        stages, free, found = self._layout.stages, self._free[rank], list[Choice]()
        own = self._own[rank]
        for stage in own:
            number = self._inputs[stage]
            if number < self._count and (ready := _ready((False, stage, number), stages, self._done)) is not None:
                found.append((max(ready, free), 0, stages - 1 - stage, number, Pass.INPUT))
            number = self._forwards[stage]
            enters = stage == own[0] and self._held[rank] >= 2 * self._layout.pp
            if number < self._count and not enters:
                ready = _ready((True, stage, number), stages, self._done)
                if ready is not None:
                    found.append((max(ready, free), 1, stages - 1 - stage, number, Pass.FORWARD))
        if self._weights[rank]:
            stage, number = self._weights[rank][0]
            found.append((max(self._done[False, stage, number], free), 2, stages - 1 - stage, number, Pass.WEIGHT))
        return min(found, default=None)

    def take(self, rank: int, kind: Pass, stage: int, micro_batch: int, end: float) -> set[int]:
        """Take note of a pass; return the ranks whose choice may be another now."""
        self._free[rank] = end
        first, last = self._own[rank][0], self._layout.stages - 1
        if kind is Pass.WEIGHT:
            self._weights[rank].popleft()
            self._held[rank] -= stage == first
            return {rank}
        self._done[kind is Pass.FORWARD, stage, micro_batch] = end
        if kind is Pass.FORWARD:
            self._forwards[stage] += 1
            self._held[rank] += stage == first
            other = min(stage + 1, last)
        else:
            self._inputs[stage] += 1
            self._weights[rank].append((stage, micro_batch))
            other = max(stage - 1, 0)
        return {rank, rank_of_stage(self._layout, other)}
