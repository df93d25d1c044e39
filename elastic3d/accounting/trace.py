"""A run as a timeline: events of the Trace Event Format, which Perfetto and Chrome read.

Nodes are processes, with a thread for what their time went to, one for each slot's trainers, and one for what else was
written down; the job is a process of its own, with its generations, recoveries, steps and checkpoints. Times are
microseconds since the run's first event, by one clock. Slices of a thread nest, and instants belong to their thread:
anything else is an error to Perfetto.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic3d.accounting.nesting import TraceSlice, in_lanes, nested
from elastic3d.accounting.node_lives import NodeLife
from elastic3d.accounting.node_spans import step_spans
from elastic3d.accounting.past_run import PastRun, by_node
from elastic3d.accounting.recorded_events import RecordedEvent, span_of
from elastic3d.accounting.recoveries import recoveries
from elastic3d.accounting.spans import Category, Span

JOB = 1
"""The job's process; nodes follow it."""

_GENERATIONS, _RECOVERIES, _STEPS, _CHECKPOINTS = range(1, 5)
_TIME, _SAID, _SAVED, _SLOTS = range(1, 5)
_LANES = 8
_THREADS = 1000
"""Numbers of a process's threads: to Perfetto they are unique, and one with its process's number is its main thread."""

_LONGEST = 300

_SHOWN_ELSEWHERE = ("step.committed", "snapshot.held", "training.progress", "trainer.started", "trainer.exited")
_OF_CHECKPOINTS = "checkpoint."
_OF_NODES = "checkpoint.written"

_WAITS = {
    Category.DATA: "waits for data",
    Category.SAVING: "waits for a snapshot",
    Category.SLOW: "waits for slow ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instant:
    at: int
    name: str
    arguments: Mapping[str, Any]


def trace(run: PastRun, spans: Mapping[str, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace, each as plain JSON data. spans: of all nodes, from `node_spans`."""
    origin = run.first
    yield from _named(JOB, "job", 0)
    yield from _thread(JOB, _GENERATIONS, "generations", origin, _generations(run))
    yield from _thread(JOB, _RECOVERIES, "recoveries and changes", origin, _recoveries(run, spans))
    yield from _thread(JOB, _STEPS, "steps", origin, _steps(run))
    events = [event for life in run.lives for event in life.events]
    saved = [one for one in events if one.name.startswith(_OF_CHECKPOINTS) and one.name != _OF_NODES]
    yield from _thread(JOB, _CHECKPOINTS, "checkpoints", origin, _verified(saved), map(_instant, saved))
    for number, (node, lives) in enumerate(by_node(run.lives).items(), start=JOB + 1):
        yield from _named(number, node, number)
        yield from _thread(number, _TIME, "what its time went to", origin, _categories(spans[node]))
        yield from _node(number, lives, origin)


def _generations(run: PastRun) -> Iterator[TraceSlice]:
    for number, generation in enumerate(run.generations, start=1):
        following = run.generations[number] if number < len(run.generations) else None
        layout = generation.formed.fields.get("layout") if generation.formed is not None else None
        yield TraceSlice(
            start=generation.sealed,
            stop=following.sealed if following is not None else run.last,
            name=f"generation {generation.number}",
            category="generation",
            arguments={
                "cause": generation.cause,
                "detail": generation.detail,
                "nodes": ", ".join(generation.nodes),
                "spares": ", ".join(generation.spares),
                "leader": generation.leader,
                "layout": str(layout or ""),
            },
        )


def _recoveries(run: PastRun, spans: Mapping[str, Sequence[Span]]) -> Iterator[TraceSlice]:
    for one in recoveries(run, spans):
        generation = one.generation
        yield TraceSlice(
            start=one.start,
            stop=one.stop,
            name=generation.cause or "not known",
            category="recovery",
            arguments={"generation": generation.number, "detail": generation.detail},
        )
        yield from _categories(one.spans)


def _categories(spans: Iterable[Span]) -> Iterator[TraceSlice]:
    for span in spans:
        yield TraceSlice(start=span.start, stop=span.stop, name=span.category.value, category="time")


def _steps(run: PastRun) -> Iterator[TraceSlice]:
    for generation in run.generations:
        start = None
        for step in generation.steps:
            yield TraceSlice(
                start=step.at - step.length if start is None else start,
                stop=step.at,
                name=f"step {step.step}",
                category="step",
                arguments={
                    "generation": generation.number,
                    "counts": step.lost_to < 0,
                    **_arguments(step.event, "loss", "gradient_norm", "seconds", "safe_step", "samples"),
                },
            )
            start = step.at
        for span in step_spans(generation):
            if span.category in _WAITS:
                yield TraceSlice(start=span.start, stop=span.stop, name=_WAITS[span.category], category="wait")


def _verified(saved: Iterable[RecordedEvent]) -> Iterator[TraceSlice]:
    for event in saved:
        if event.name == "checkpoint.verified":
            yield TraceSlice(
                start=event.at - event.span("seconds"),
                stop=event.at,
                name=f"read back step {event.whole('step')}",
                category="checkpoint",
            )


def _node(number: int, lives: Sequence[NodeLife], origin: int) -> Iterator[dict[str, Any]]:
    events = [event for life in lives for event in life.events]
    said = [
        event for event in events if event.name not in _SHOWN_ELSEWHERE and not event.name.startswith(_OF_CHECKPOINTS)
    ]
    yield from _thread(number, _SAID, "events", origin, (), map(_instant, said))
    written = [event for event in events if event.name == _OF_NODES]
    if written:
        yield from _thread(number, _SAVED, "checkpoints", origin, (), map(_instant, written))
    trainers: dict[int, list[TraceSlice]] = defaultdict(list)
    for life in lives:
        for slot, one in _trainers(life):
            trainers[slot].append(one)
    parts: dict[int, list[TraceSlice]] = defaultdict(list)
    held: dict[int, list[_Instant]] = defaultdict(list)
    for event in events:
        if event.name == "state.restored":
            parts[event.slot] += _parts(event)
        elif event.name == "snapshot.held":
            held[event.slot].append(_instant(event))
    for slot in sorted({*trainers, *held}):
        for lane, row in enumerate(in_lanes(trainers[slot])[:_LANES] or [[]]):
            inner = [part for part in parts[slot] for one in row if _is_part(part, one)]
            name = f"slot {slot}" if not lane else f"slot {slot}, beside"
            thread = _SLOTS + slot * _LANES + lane
            yield from _thread(number, thread, name, origin, [*row, *inner], held[slot] if not lane else ())


def _trainers(life: NodeLife) -> Iterator[tuple[int, TraceSlice]]:
    open_ones: dict[tuple[int, int], RecordedEvent] = {}
    for event in (*life.events, None):
        if event is None or event.name == "job.ended":
            for (slot, _), started in open_ones.items():
                yield slot, _trainer(started, life.last if event is None else event.at, "cut short")
            open_ones = {}
        elif event.name == "trainer.started":
            open_ones[event.slot, event.generation] = event
        elif event.name == "trainer.exited" and (event.slot, event.generation) in open_ones:
            started = open_ones.pop((event.slot, event.generation))
            yield event.slot, _trainer(started, event.at, event.text("kind"))


def _trainer(started: RecordedEvent, stop: int, end: str) -> TraceSlice:
    name = f"rank {started.rank}" if started.rank is not None else "trainer"
    return TraceSlice(
        start=started.at,
        stop=stop,
        name=f"{name} of generation {started.generation}",
        category="trainer",
        arguments={"end": end, "generation": started.generation, **_arguments(started, "pid")},
    )


def _parts(event: RecordedEvent) -> list[TraceSlice]:
    """Return the parts of a trainer's beginning; each carries its generation, to be put into its trainer."""
    parts = event.fields.get("parts")
    named = [part for part in parts if isinstance(part, list) and len(part) > 1] if isinstance(parts, list) else []
    at = event.at - sum(span_of(part[1]) for part in named)
    slices = []
    for part in named:
        stop = at + span_of(part[1])
        about = {"generation": event.generation}
        slices.append(TraceSlice(start=at, stop=stop, name=str(part[0]), category="part", arguments=about))
        at = stop
    return slices


def _is_part(part: TraceSlice, trainer: TraceSlice) -> bool:
    return part.arguments["generation"] == trainer.arguments["generation"] and part.stop <= trainer.stop


def _instant(event: RecordedEvent) -> _Instant:
    names = [name for name in event.fields if name not in ("event", "at", "run", "node", "slot", "traceback")]
    return _Instant(at=event.at, name=event.name, arguments=_arguments(event, *names))


def _arguments(event: RecordedEvent, *names: str) -> dict[str, Any]:
    """Return fields as they are shown: numbers as they are, all else as text that is not too long."""
    values = {name: event.fields[name] for name in names if event.fields.get(name) is not None}
    return {
        name: value if isinstance(value, bool | int | float) else str(value)[:_LONGEST]
        for name, value in values.items()
    }


def _named(process: int, name: str, place: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": place}}


def _thread(
    process: int,
    thread: int,
    name: str,
    origin: int,
    slices: Iterable[TraceSlice],
    instants: Iterable[_Instant] = (),
) -> Iterator[dict[str, Any]]:
    where = {"pid": process, "tid": process * _THREADS + thread}
    yield {"ph": "M", **where, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for one in nested(slices):
        yield {
            "ph": "X",
            **where,
            "ts": one.start - origin,
            "dur": one.stop - one.start,
            "name": one.name,
            "cat": one.category,
            "args": dict(one.arguments),
        }
    for instant in sorted(instants, key=lambda instant: instant.at):
        yield {
            "ph": "i",
            "s": "t",
            **where,
            "ts": instant.at - origin,
            "name": instant.name,
            "args": dict(instant.arguments),
        }
