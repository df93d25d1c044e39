"""When each pipeline rank computes which micro-batch: a schedule's order of actions on a clock.

An action begins when the one before it on its rank has ended and its input has arrived: a forward needs the output of
the stage before, a backward the gradient of the stage after, and either costs a hop if that is on another rank.
Sending is not charged to the sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.planner.pipeline_actions import Action, Pass, orders
from elastic3d.planner.schedules import rank_of_stage, schedule_of
from elastic3d.values import Layout

MOST = 8_000
"""Most computations that are laid out one by one; of longer steps the beginning and the end, with an equal middle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one micro-batch on one stage: forward, and the two halves of the backward."""

    forward: float
    input: float
    weight: float

    def of(self, kind: Pass) -> float:
        """Return the seconds of an action."""
        match kind:
            case Pass.FORWARD:
                return self.forward
            case Pass.INPUT:
                return self.input
            case Pass.WEIGHT:
                return self.weight
            case Pass.BACKWARD:
                return self.input + self.weight

    @property
    def whole(self) -> float:
        """Seconds of a forward and its backward."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledAction:
    """One computation on one pipeline rank, from `start` to `end`, in the unit of the costs."""

    kind: Pass
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The computations of each pipeline rank, in order. micro_batches: how many are laid out, of `of` in all.

    bubble: share of the ranks' time in which they wait, over all micro-batches.
    """

    ranks: tuple[tuple[ScheduledAction, ...], ...]
    micro_batches: int
    of: int
    bubble: float

    @property
    def span(self) -> float:
        """Time from the first computation to the end of the last."""
        return max(works[-1].end for works in self.ranks)


def timeline(layout: Layout, micro_batches: int, *, backward: float = 2.0) -> Timeline:
    """Return the timeline of one step of a layout whose pipelines run `micro_batches` each.

    The unit of time is a forward of a whole rank; stages are equal, and there is no communication. backward: time of a
    backward in forwards; 3 with full recomputation, which comes before the gradients of inputs.
    """
    laid = micro_batches
    if 2 * micro_batches * layout.stages > MOST:
        # Whole turns of interleaved schedules, and enough of them for the middle to be steady.
        least = 2 if layout.virtual > 1 else 1
        laid = min(micro_batches, layout.pp * max(least, MOST // (2 * layout.stages * layout.pp)))
    each = 1.0 / layout.virtual
    cost = StageCost(forward=each, input=(backward - 1.0) * each, weight=each)
    ranks = play(layout, laid, [cost] * layout.stages)
    span = max(works[-1].end for works in ranks)
    busy = laid * (1.0 + backward)
    idle = span - busy
    return Timeline(
        ranks=ranks,
        micro_batches=laid,
        of=micro_batches,
        bubble=idle / (idle + micro_batches * (1.0 + backward)),
    )


def play(
    layout: Layout, rounds: int, costs: Sequence[StageCost], hop: float = 0.0
) -> tuple[tuple[ScheduledAction, ...], ...]:
    """Return what each pipeline rank computes, and when, for `rounds` micro-batches; the layout must be legal.

    costs: of each stage. hop: time for an activation, or its gradient, to reach another rank.
    """
    schedule = schedule_of(layout)
    if schedule is None:
        acts = [[Action(kind, 0, number) for number in range(rounds) for kind in (Pass.FORWARD, Pass.BACKWARD)]]
    else:
        acts = orders(schedule, pp=layout.pp, rounds=rounds, virtual=layout.virtual)
    rank_of = [rank_of_stage(layout, stage) for stage in range(layout.stages)]
    ended: dict[tuple[bool, int, int], float] = {}
    works: list[list[ScheduledAction]] = [[] for _ in acts]
    free = [0.0] * len(acts)
    while any(len(done) < len(own) for done, own in zip(works, acts, strict=True)):
        before = len(ended)
        for rank, own in enumerate(acts):
            for kind, stage, number in own[len(works[rank]) :]:
                forward, start = kind is Pass.FORWARD, free[rank]
                source = stage - 1 if forward else stage + 1
                if kind is not Pass.WEIGHT and 0 <= source < layout.stages:
                    arrived = ended.get((forward, source, number))
                    if arrived is None:
                        break
                    start = max(start, arrived + (hop if rank_of[source] != rank else 0.0))
                free[rank] = start + costs[stage].of(kind)
                if kind is not Pass.WEIGHT:
                    ended[forward, stage, number] = free[rank]
                works[rank].append(
                    ScheduledAction(kind=kind, stage=stage, micro_batch=number, start=start, end=free[rank])
                )
        left = any(len(done) < len(own) for done, own in zip(works, acts, strict=True))
        assert len(ended) > before or not left, f"{layout}: the orders of its ranks wait for each other"
    return tuple(tuple(done) for done in works)


def kept(works: Sequence[ScheduledAction]) -> int:
    """Return the most micro-batches whose activations a rank keeps, each of its stages counted separately."""
    most = held = 0
    for work in works:
        if work.kind is Pass.FORWARD:
            held += 1
            most = max(most, held)
        elif work.kind is not Pass.INPUT:
            held -= 1
    return most
