"""A run as its nodes' events tell it: its generations in order, their steps, and how each of them ended."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic3d.accounting.node_lives import NodeLife
from elastic3d.accounting.past_steps import (
    PastSlowness,
    PastStep,
    PastWaits,
    hold,
    inferred_steps,
    made_steps,
    slowed,
    waits_of,
)
from elastic3d.accounting.recorded_events import RecordedEvent, span_of

FAILED_EXITS = ("crash", "peer_lost", "template", "error", "out_of_memory", "convicted")
"""How trainers end for which a generation ends without a plan."""

SILENT = ("rank.silent", "rank.suspected", "rank.stuck", "training.stalled")
"""What is written down while a rank shows no progress. A step that is late alone may be one with an evaluation."""

ACCOUNTED = frozenset(
    {
        "generation.sealed",
        "generation.proposed",
        "trainer.started",
        "state.restored",
        "step.committed",
        "steps.waited",
        "trainer.exited",
        "snapshot.held",
        "node.slow",
        "node.well",
        "peer.lost",
        "rank.stuck",
    }
)
"""Events of whose fields this package makes use; of all others only the name, the time and the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRestore:
    """A trainer had its state. parts: of the time since it began, in order, each a name and microseconds."""

    at: int
    rank: int | None
    source: str
    step: int
    parts: tuple[tuple[str, int], ...]

    @property
    def began(self) -> int:
        """When the trainer began."""
        return self.at - sum(length for _, length in self.parts)


@dataclass(slots=True, kw_only=True)
class PastGeneration:
    """A generation, as far as events tell of it.

    index: its place among all, from 0. sealed: when, by the first who knew; sealed_at, restored, exits, started: by
    node. formed: what `generation.sealed` says, None where nobody wrote that down. failed: when somebody knew that it
    had failed, None where it ended as planned or goes on. alive: the last sign of life of what failed. inferred: its
    steps are known by their snapshots only.
    """

    index: int
    start: int
    number: int
    sealed: int
    formed: RecordedEvent | None = None
    cause: str = ""
    detail: str = ""
    leader: str = ""
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    sealed_at: dict[str, int] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    restored: dict[str, PastRestore] = field(default_factory=dict)
    exits: dict[str, list[RecordedEvent]] = field(default_factory=lambda: defaultdict(list))
    steps: list[PastStep] = field(default_factory=list)
    slowness: list[PastSlowness] = field(default_factory=list)
    failed: int | None = None
    alive: int | None = None
    inferred: bool = False

    @property
    def usual(self) -> int:
        """Microseconds of a median step, the first left out where there are others; 0 without any."""
        lengths = [step.length for step in self.steps[1:] or self.steps]
        return round(statistics.median(lengths)) if lengths else 0

    def told_apart(self) -> frozenset[str]:
        """Return the nodes to which its steps were something else than to the others."""
        waits = {name for step in self.steps if step.waits is not None for name in step.waits.apart}
        return frozenset(waits.union(*(one.nodes for one in self.slowness)))

    @property
    def base(self) -> int | None:
        """The step from which it goes on, None where that is not known."""
        known = [restored.step for restored in self.restored.values()]
        known += [self.steps[0].step - 1] if self.steps else []
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A run. lives: of all nodes, in order of time. generations: in order. awaited: spans (start, stop) in which fewer
    nodes were there than the job may train with.
    """

    lives: tuple[NodeLife, ...]
    generations: tuple[PastGeneration, ...]
    awaited: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """Time of its first event."""
        return min(life.first for life in self.lives)

    @property
    def last(self) -> int:
        """Time of its last event."""
        return max(life.last for life in self.lives)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of all nodes, in the order in which they came."""
        return tuple(dict.fromkeys(life.node for life in self.lives))


def past_run(lives: Sequence[NodeLife]) -> PastRun:
    """Return the run of these lives, whose times are all by one clock; at least one."""
    ordered = tuple(sorted(lives, key=lambda life: (life.first, life.node)))
    generations = _generations(ordered)
    notices = sorted(_notices(ordered), key=lambda event: event.at)
    for generation in generations:
        following = generations[generation.index + 1] if generation.index + 1 < len(generations) else None
        _compare(generation, following)
        _end(generation, following, ordered, notices)
    _lose(generations)
    return PastRun(lives=ordered, generations=tuple(generations), awaited=tuple(sorted(_awaited(ordered, generations))))


def _generations(lives: Sequence[NodeLife]) -> list[PastGeneration]:
    by_key: dict[tuple[int, int], PastGeneration] = {}
    commits: dict[tuple[int, int], list[RecordedEvent]] = defaultdict(list)
    held: dict[tuple[int, int], dict[int, RecordedEvent]] = defaultdict(dict)
    silent: dict[tuple[int, int], list[int]] = defaultdict(list)
    waited: dict[tuple[int, int], list[PastWaits]] = defaultdict(list)
    for life in lives:
        for event in life.events:
            number = event.whole("number") if event.name == "generation.sealed" else event.generation
            if not number:
                continue
            key = life.start, number
            match event.name:
                case "generation.sealed":
                    _seal(_of(by_key, key, event.at), event, life)
                case "trainer.started":
                    _of(by_key, key, event.at).started.setdefault(life.node, event.at)
                case "state.restored":
                    _restore(_of(by_key, key, event.at), event, life)
                case "trainer.exited":
                    _of(by_key, key, event.at).exits[life.node].append(event)
                case "step.committed" if event.whole("step"):
                    _of(by_key, key, event.at)
                    commits[key].append(event)
                case "steps.waited":
                    waited[key] += [one for one in [waits_of(event)] if one is not None]
                case "snapshot.held" if event.whole("step"):
                    _of(by_key, key, event.at)
                    hold(held[key], event)
                case "node.slow" | "node.well":
                    generation = _of(by_key, key, event.at)
                    generation.slowness = slowed(generation.slowness, event)
                case name if name in SILENT:
                    silent[key].append(event.at)
                case _:
                    pass
    generations = [by_key[key] for key in sorted(by_key)]
    for index, generation in enumerate(generations):
        generation.index = index
        key = generation.start, generation.number
        if generation.formed is None:  # its sealing is lost: those that wrote anything of it were in it
            wrote = {*generation.started, *generation.restored, *generation.exits}
            generation.nodes = tuple(sorted(wrote | {event.node for event in (*commits[key], *held[key].values())}))
        generation.inferred = bool(held[key]) and not commits[key]
        made = made_steps(commits[key], sorted(silent[key]), waited[key])
        generation.steps = made or inferred_steps(held[key].values())
    return generations


def _of(by_key: dict[tuple[int, int], PastGeneration], key: tuple[int, int], at: int) -> PastGeneration:
    if key not in by_key:
        by_key[key] = PastGeneration(index=0, start=key[0], number=key[1], sealed=at)
    generation = by_key[key]
    if generation.formed is None:
        generation.sealed = min(generation.sealed, at)
    return generation


def _seal(generation: PastGeneration, event: RecordedEvent, life: NodeLife) -> None:
    member = life.node in event.names("nodes") or life.node in event.names("spares")
    if generation.formed is None or (member and event.at < generation.sealed):
        generation.formed, generation.sealed = event, event.at
    generation.cause, generation.detail = event.text("cause"), event.text("detail")
    generation.leader = event.text("leader")
    generation.nodes, generation.spares = event.names("nodes"), event.names("spares")
    generation.sealed_at.setdefault(life.node, event.at)


def _restore(generation: PastGeneration, event: RecordedEvent, life: NodeLife) -> None:
    parts = event.fields.get("parts")
    named = [part for part in parts if isinstance(part, list) and len(part) > 1] if isinstance(parts, list) else []
    before = generation.restored.get(life.node)
    if before is None or event.at >= before.at:  # of a node's ranks, the others wait for the last
        generation.restored[life.node] = PastRestore(
            at=event.at,
            rank=event.rank,
            source=event.text("source"),
            step=event.whole("step") or 0,
            parts=tuple((str(name), span_of(seconds)) for name, seconds, *_ in named),
        )


def _compare(generation: PastGeneration, following: PastGeneration | None) -> None:
    if following is not None:
        before = {*generation.nodes, *generation.spares}
        after = {*following.nodes, *following.spares}
        following.gone = tuple(sorted(before - after))
        following.come = tuple(sorted(after - before))


def _notices(lives: Sequence[NodeLife]) -> Iterator[RecordedEvent]:
    for life in lives:
        for event in life.events:
            if event.name == "peer.lost" or (event.name == "rank.stuck" and event.says("act")):
                yield event


def _end(
    generation: PastGeneration,
    following: PastGeneration | None,
    lives: Sequence[NodeLife],
    notices: Sequence[RecordedEvent],
) -> None:
    """Find out whether a generation failed, when somebody knew, and what was alive until when."""
    until = following.sealed if following is not None else max(life.last for life in lives)
    exits = [event for events in generation.exits.values() for event in events]
    known = [event.at for event in exits if event.text("kind") in FAILED_EXITS]
    lost: set[str] = set()
    stuck = False
    for event in notices[bisect_left(notices, generation.sealed, key=lambda event: event.at) :]:
        if event.at > until:
            break
        if event.name == "peer.lost" and event.text("peer") in generation.nodes:
            known.append(event.at)
            lost.add(event.text("peer"))
        elif event.name == "rank.stuck" and event.generation == generation.number:
            known.append(event.at)
            stuck = True
    if not known:
        return
    reached = generation.steps[-1].at if generation.steps else generation.sealed
    failed = generation.failed = max(min(known), min(reached, until))
    signs = [life.last for life in lives if life.node in lost and generation.sealed <= life.last <= until]
    if signs:
        generation.alive = min(failed, max(reached, *signs))
    elif lost or stuck:  # whoever stood still made at most one more step
        generation.alive = min(failed, reached + generation.usual)
    else:
        generation.alive = failed


def _lose(generations: Sequence[PastGeneration]) -> None:
    """Mark the steps behind which a later generation went back."""
    behind: list[tuple[int, PastGeneration]] = []
    for generation in reversed(generations):
        generation.steps = [_lost(step, behind) for step in generation.steps]
        base = generation.base
        if base is not None:
            # Of those that went back, the first counts: a later one that went back less far takes nothing more.
            behind = [(base, generation), *(one for one in behind if one[0] < base)]


def _lost(step: PastStep, behind: Sequence[tuple[int, PastGeneration]]) -> PastStep:
    for base, generation in behind:
        if step.step > base:
            return replace(step, lost_to=generation.index)
    return step


def _awaited(lives: Sequence[NodeLife], generations: Sequence[PastGeneration]) -> Iterator[tuple[int, int]]:
    sealed = sorted(generation.sealed for generation in generations)
    end = max(life.last for life in lives)
    for life in lives:
        for event in life.events:
            if event.name == "nodes.awaited":
                place = bisect_right(sealed, event.at)
                yield event.at, sealed[place] if place < len(sealed) else end


def by_node(lives: Sequence[NodeLife]) -> Mapping[str, list[NodeLife]]:
    """Return the lives of each node, in order."""
    nodes: dict[str, list[NodeLife]] = {}
    for life in sorted(lives, key=lambda life: life.first):
        nodes.setdefault(life.node, []).append(life)
    return nodes
