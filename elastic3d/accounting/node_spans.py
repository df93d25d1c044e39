"""The spans of each node: what its time went to, from its first event to its last.

Layers are painted one over the other, the surest last: what the membership made of a node; what its trainers were at;
how a generation failed; the steps that were made. So steps that the old generation makes while the next one is being
prepared are steps, and what is prepared beside them costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic3d.accounting.node_lives import NodeLife
from elastic3d.accounting.past_run import PastGeneration, PastRun, by_node
from elastic3d.accounting.spans import Category, Span, paint, within

PARTS = {"awaiting": Category.FORMING, "loading": Category.RESTORING}
"""What parts of a trainer's beginning are, where they are not preparing."""

IDLE = (Category.FORMING, Category.JOINING, Category.SPARE)
"""What is waiting for nodes while too few are there."""

OF_TRAINERS = ("trainer.started", "state.restored", "step.committed", "snapshot.held", "trainer.exited")


def node_spans(run: PastRun) -> Mapping[str, tuple[Span, ...]]:
    """Return the spans of each node, in order and without gaps."""
    common = {generation.index: step_spans(generation) for generation in run.generations}
    apart = {generation.index: generation.told_apart() for generation in run.generations}
    result: dict[str, tuple[Span, ...]] = {}
    for node, lives in by_node(run.lives).items():
        spans: list[Span] = []
        for number, life in enumerate(lives):
            if number and life.first > lives[number - 1].last:
                spans.append(Span(lives[number - 1].last, life.first, Category.AWAY))
            spans += _of_life(life, run, common, apart)
        result[node] = tuple(spans)
    return result


def step_spans(generation: PastGeneration, node: str = "") -> list[Span]:
    """Return what the steps of a generation were to one of its nodes, in order; "": to those that are not told apart.

    A lost step is repeated as a whole. Of the others, waits are cut out; who is slow does not wait for itself.
    """
    spans: list[Span] = []
    usual = generation.usual
    for number, step in enumerate(generation.steps):
        start = generation.steps[number - 1].at if number else step.at - step.length
        length = step.at - start
        if step.lost_to >= 0:
            spans.append(Span(start, step.at, Category.REPEATED, step.lost_to))
            continue
        if not number:
            begun = step.at - min(length, usual)
            spans += [
                Span(start, begun, Category.PREPARING, generation.index),
                Span(begun, step.at, Category.USEFUL),
            ]
            continue
        costs = [
            one
            for one in generation.slowness
            if one.since < step.step <= (one.until if one.until is not None else step.step)
        ]
        waited, copied, behind = max([step.data, *(one.cost for one in costs if one.data)]), step.copy, 0
        if step.waits is not None:
            waited, copied, behind = step.waits.of(node)
        data = min(length, waited)
        copy = min(length - data, copied)
        slow = sum(one.cost for one in costs if not one.data and node not in one.nodes)
        slow = max(slow, behind, length - data - copy - usual if step.silent else 0)
        slow = min(length - data - copy, slow)
        ends = (start + data, step.at - copy - slow, step.at - copy, step.at)
        categories = (Category.DATA, Category.USEFUL, Category.SLOW, Category.SAVING)
        for category, stop in zip(categories, ends, strict=True):
            if stop > start:
                spans.append(Span(start, stop, category))
            start = stop
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A generation as a life sees it, from one time to another. before: the one before, if this life trained in it."""

    generation: PastGeneration
    start: int
    stop: int
    active: bool
    spare: bool
    last: bool
    before: PastGeneration | None

    @property
    def following(self) -> int:
        return -1 if self.last else self.generation.index + 1


def _of_life(
    life: NodeLife, run: PastRun, common: Mapping[int, list[Span]], apart: Mapping[int, frozenset[str]]
) -> list[Span]:
    if life.last <= life.first:
        return []
    views = list(_views(life, run))
    spans = _membership(life, views)
    trained = [view for view in views if view.active]
    spans = paint(spans, [span for view in trained for span in _beginning(life, view)])
    spans = paint(spans, [span for view in trained for span in _failure(view)])
    for start, stop in run.awaited:
        idle = (part for part in within(spans, start, stop) if part.category in IDLE)
        spans = paint(spans, [Span(part.start, part.stop, Category.WAITING, part.cause) for part in idle])
    steps: list[Span] = []
    for view in trained:
        own = life.node in apart[view.generation.index]
        steps += step_spans(view.generation, life.node) if own else common[view.generation.index]
    spans = paint(spans, steps)
    return paint(spans, _end(life, views))


def _views(life: NodeLife, run: PastRun) -> Iterator[_View]:
    numbers = {event.generation for event in life.events if event.name in OF_TRAINERS}
    own = [one for one in run.generations if one.start == life.start]
    reached = life.first
    before: PastGeneration | None = None
    for place, generation in enumerate(own):
        start = max(reached, _seen(generation, life))
        last = place + 1 == len(own)
        stop = life.last if last else max(start, _seen(own[place + 1], life))
        # One that came back with the same name, while others still train in a generation that has the former one.
        there = generation.number in numbers or life.first <= generation.sealed
        active = there and life.node in generation.nodes
        yield _View(
            generation=generation,
            start=start,
            stop=stop,
            active=active,
            spare=there and life.node in generation.spares,
            last=generation.index + 1 == len(run.generations),
            before=before,
        )
        reached, before = start, generation if active else None


def _seen(generation: PastGeneration, life: NodeLife) -> int:
    at = generation.sealed_at.get(life.node)
    return generation.sealed if at is None or not life.first <= at <= life.last else at


def _membership(life: NodeLife, views: Sequence[_View]) -> list[Span]:
    """Return the lowest layer: what a node is by the generations alone."""
    orders = ("node.draining", "node.leaving")
    asked = min((event.at for event in life.events if event.name in orders), default=None)
    fenced = [event.at for event in life.events if event.name == "member.fenced"]
    spans: list[Span] = []
    at = life.first
    for number, view in enumerate(views):
        taken_in = next((later.generation.index for later in views[number:] if later.active or later.spare), -1)
        member = any(earlier.active or earlier.spare for earlier in views[:number])
        if not number:
            spans.append(_span(at, view.start, Category.JOINING if life.whole else Category.UNKNOWN, taken_in))
            at = max(at, view.start)
        stop = view.stop
        if view.active:
            ends = Category.UNKNOWN if view.last and view.generation.failed is None else Category.FORMING
            spans.append(_span(at, stop, ends, view.following))
        elif view.spare:
            spans.append(_span(at, stop, Category.SPARE))
        elif member and asked is None and fenced:
            # Put out, and not aware of it until it is fenced; then a newcomer.
            aware = min((one for one in fenced if one >= at), default=at)
            spans.append(_span(at, min(aware, stop), Category.NOTICING, view.generation.index))
            spans.append(_span(min(aware, stop), stop, Category.JOINING, taken_in))
        elif member or (asked is not None and asked <= at):
            spans.append(_span(at, stop, Category.LEAVING))
        else:
            spans.append(_span(at, stop, Category.JOINING, taken_in))
        at = max(at, stop)
    spans.append(_span(at, life.last, Category.JOINING if life.whole and not views else Category.UNKNOWN))
    return paint([Span(life.first, life.last, Category.UNKNOWN)], spans)


def _span(start: int, stop: int, category: Category, cause: int = -1) -> Span:
    return Span(start, max(start, stop), category, cause)


def _beginning(life: NodeLife, view: _View) -> list[Span]:
    """Return what a generation's trainers of this node were at, until the first step."""
    generation, index = view.generation, view.generation.index
    stop = view.stop if generation.failed is None else min(view.stop, generation.failed)
    first = generation.steps[0].at if generation.steps else stop
    restored = generation.restored.get(life.node)
    if restored is None or not life.first <= restored.at <= life.last:
        begun = life.node in generation.started or generation.steps
        return [_span(view.start, first, Category.PREPARING if begun else Category.FORMING, index)]
    # What was prepared while the generation before went on took none of its time.
    before = view.before
    least = view.start if before is None else before.steps[-1].at if before.steps else before.sealed
    spans = [_span(view.start, max(view.start, restored.began), Category.PREPARING, index)]
    at = restored.began
    for name, length in restored.parts:
        spans.append(_span(max(at, least), at + length, PARTS.get(name, Category.PREPARING), index))
        at += length
    return [*spans, _span(restored.at, first, Category.PREPARING, index)]


def _failure(view: _View) -> list[Span]:
    """Return how a generation failed: the step that was cut short, noticing, and what follows."""
    generation = view.generation
    if generation.failed is None or generation.alive is None:
        return []
    reached = generation.steps[-1].at if generation.steps else generation.alive
    return [
        _span(reached, generation.alive, Category.REPEATED, view.following),
        _span(generation.alive, generation.failed, Category.NOTICING, view.following),
        _span(generation.failed, view.stop, Category.FORMING, view.following),
    ]


def _end(life: NodeLife, views: Sequence[_View]) -> list[Span]:
    """Return what comes after the last step of a run that is done."""
    if not views or not views[-1].active:
        return []
    generation = views[-1].generation
    done = [event.at for event in generation.exits.get(life.node, ()) if event.text("kind") == "done"]
    if not done:
        return []
    return [_span(generation.steps[-1].at if generation.steps else done[0], life.last, Category.SAVING)]
