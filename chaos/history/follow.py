"""What happened to a job, from its event files alone.

`Follower` reads the files while they grow. `picture` is a pure function of the events and of what was done to the
job: the same lines give the same picture, while the job runs and years after. Wall clocks are compared here, which is
right on one machine only: this is how a test or a demo looks at a local cluster, not how the runtime decides.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos.history.claims import Accusation, Commit, Loss, accusations, commits, losses

# How a trainer or a job can end: by an error of the script, or by anything that ends the generation too.
_ERROR = "error"
_FAILURES = (_ERROR, "crash", "template", "peer_lost")
ORDERLY_EXITS = ("done", "left", "measured", "stopped", "peer_lost")
"""How a trainer ends to which nothing was done: kinds of `trainer.exited`."""
# What is done to a node that ends with an error of its own: it loses a keeper, is turned away, or cannot kill.
_FAILED = ("keepers killed", "freeze-companion", "join-other", "unkillable")

# Changes of membership that everybody leaves for at a step boundary, what brings them about, and for how many seconds
# before them something else that was done to the job may be what took their steps.
_PLANNED = ("join", "drain", "quarantine", "balance")
_ORDERLY = ("drain", "sigterm", "notice", "join", "start")
_LATELY = 10.0

# What is done on purpose to a node that leaves, and to one that comes.
_TAKES = ("kill", "drain", "sigterm", "notice", "stop")
_BRINGS = ("join", "cont", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of an event file; `fields` holds what the event's own name asks for."""

    name: str
    at: float
    generation: int
    node: str
    slot: int
    rank: int | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Something done to the job on purpose: `kind` is "kill", "drain"..., or a fault of etcd, which has no `node`."""

    kind: str
    node: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One committed step. `loss` is `float.hex()` text; `samples` are positions of the run, half-open; `excluded` those
    of them that are no part of it. `sample_sum` is None where only the state says that the step was made."""

    number: int
    generation: int
    at: float
    loss: str
    seconds: float
    samples: tuple[int, int]
    sample_sum: int | None
    excluded: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationView:
    """One sealed generation and its outcome.

    first_step: the first step it committed, None while there is none. seconds_to_first_step: from the event that
    caused it to the commit of that step. steps_repeated: steps made before it that it made again. planned_repeats:
    those of them that the generation just before it had made, all of whose trainers left at a step boundary, while
    nothing was done to the job that could take them. pause: how much longer than an ordinary step the gap between the
    last step before it and its first one was, None for the first generation. restored_from: "none", "memory", "store"
    or "".
    """

    number: int
    cause: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    leader: str
    layout: Mapping[str, int]
    detail: str
    sealed_at: float
    restored_from: str
    first_step: int | None
    last_step: int | None
    steps_repeated: int
    planned_repeats: int
    seconds_to_first_step: float | None
    pause: float | None

    @property
    def world(self) -> int:
        """How many ranks it has; 0 where its layout is unknown."""
        return math.prod(self.layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")) if self.layout else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The account of samples: every position of the run must be consumed once in the history that counts."""

    consumed: int
    repeated: int
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A job as its events show it.

    steps: the history that counts, in order; a step done again replaces its earlier self and all that came after.
    conflicts: steps done more than once with another loss or other samples, though nothing of them was left out in
    between, and nobody was convicted of having made them: broken promises. news: the last lines worth a person's eye,
    oldest first. commits: who committed which checkpoint. accused: who was named as being at fault. lost: who was
    taken for dead. seen: how many lines there are of each event, by its name and its generation; sealing belongs to the
    sealed one.
    """

    generations: tuple[GenerationView, ...] = ()
    steps: tuple[Step, ...] = ()
    conflicts: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()
    news: tuple[tuple[float, str], ...] = ()
    ended: tuple[str, ...] = ()
    checkpoints: tuple[int, ...] = ()
    commits: tuple[Commit, ...] = ()
    accused: tuple[Accusation, ...] = ()
    lost: tuple[Loss, ...] = ()
    seen: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @property
    def losses(self) -> tuple[str, ...]:
        """Losses of the history that counts, as hex text, by step."""
        return tuple(step.loss for step in self.steps)

    @property
    def step(self) -> int:
        """The newest step that counts; 0 before the first."""
        return self.steps[-1].number if self.steps else 0

    @property
    def generation(self) -> GenerationView | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    def said(self, name: str) -> int:
        """Return how many lines there are of an event, in all generations."""
        return sum(count for (event, _), count in self.seen.items() if event == name)


def parse(line: str) -> Event | None:
    """Return the event of one line; None where the line is not a whole event, as after a crash in mid-write."""
    try:
        data = json.loads(line)
        rank = data.get("rank")
        return Event(
            name=str(data["event"]),
            at=float(data["at"]),
            generation=int(data.get("generation") or 0),
            node=str(data.get("node") or ""),
            slot=int(data.get("slot") or 0),
            rank=None if rank is None else int(rank),
            fields=data,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass(slots=True)
class Follower:
    """Read the event files `*.jsonl` under a folder, each new whole line once; files may appear at any time.

    righted: returns this machine's time of what a node has written just now, where nodes have clocks of their own.
    """

    folder: Path
    righted: Callable[[str, float], float] | None = None
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> list[Event]:
        """Return the new events since the last call, in the order of the wall clock."""
        events: list[Event] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self._offsets[path] = offset + whole
            for line in data[:whole].decode(errors="replace").splitlines():
                event = parse(line)
                if event is not None and self.righted is not None:
                    event = replace(event, at=self.righted(event.node, event.at))
                if event is not None:
                    events.append(event)
        return sorted(events, key=lambda event: event.at)


def picture(events: Iterable[Event], injections: Sequence[Injection] = (), started_at: float | None = None) -> Picture:
    """Return the picture of `events`; `injections` and `started_at` give the generations' causes their time."""
    ordered = sorted(events, key=lambda event: event.at)
    committed = [as_step(event) for event in ordered if event.name == "step.committed"]
    history, conflicts = lineage(committed, distrusted(ordered))
    steps = with_untold(history, ordered)
    # Such a node says why: that is no mistake of the script's.
    failed = {done.node for done in injections if done.kind in _FAILED}
    return Picture(
        generations=_generations(ordered, committed, injections, started_at),
        steps=steps,
        conflicts=conflicts,
        errors=tuple(
            str(event.fields["error"])
            for event in ordered
            if event.name in ("trainer.exited", "job.ended") and event.fields.get("kind") == _ERROR
            if not (event.name == "job.ended" and event.node in failed)
        ),
        news=_news(ordered, injections),
        ended=tuple(event.node for event in ordered if event.name == "job.ended" and event.slot == 0),
        checkpoints=tuple(
            sorted({int(event.fields["step"]) for event in ordered if event.name == "checkpoint.committed"})
        ),
        commits=commits(ordered),
        accused=accusations(ordered),
        lost=losses(ordered),
        seen=Counter((event.name, int(event.fields.get("number") or event.generation)) for event in ordered),
    )


def ledger(steps: Sequence[Step], expected: int | None = None) -> Ledger:
    """Account for the samples of `steps`, the history that counts; `expected` is how many the run should consume."""
    reach, repeated, missing = 0, 0, 0
    for first, stop in sorted(step.samples for step in steps):
        missing += max(0, first - reach)
        repeated += max(0, min(stop, reach) - first)
        reach = max(reach, stop)
    consumed = reach - missing
    if expected is not None:
        missing += max(0, expected - reach)
        repeated += max(0, reach - expected)
    return Ledger(consumed=consumed, repeated=repeated, missing=missing)


def as_step(event: Event) -> Step:
    """Return the step of a `step.committed`."""
    first, stop = event.fields["samples"]
    return Step(
        number=int(event.fields["step"]),
        generation=event.generation,
        at=event.at,
        loss=str(event.fields["loss"]),
        seconds=float(event.fields["seconds"]),
        samples=(int(first), int(stop)),
        excluded=tuple((int(first), int(stop)) for first, stop in event.fields.get("excluded") or ()),
        sample_sum=int(event.fields.get("sample_sum") or 0),
    )


def distrusted(events: Iterable[Event]) -> list[tuple[int, int]]:
    """Return for each time that states were distrusted after which step and before which generation those were made."""
    return [
        (int(event.fields["step"]), int(event.fields["before"])) for event in events if event.name == "state.distrusted"
    ]


def same_bits(earlier: Step, later: Step) -> bool:
    """Return whether a step has the same bits where it was made again."""
    theirs = (earlier.loss, earlier.samples, earlier.sample_sum)
    return theirs == (later.loss, later.samples, later.sample_sum)


def lineage(
    committed: Sequence[Step],
    wrong: Sequence[tuple[int, int]] = (),
    same: Callable[[Step, Step], bool] = same_bits,
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Return the history that counts among steps as they were committed, and the conflicts: see `Picture`.

    wrong: as `distrusted` returns them; their steps may have had wrong bits. same: whether a step is the same where it
    was made again.
    """
    history: dict[int, Step] = {}
    seen: dict[int, Step] = {}
    conflicts = set()
    previous = 0
    for step in sorted(committed, key=lambda step: (step.generation, step.number)):
        if step.generation != previous:
            history = {number: old for number, old in history.items() if number < step.number}
            previous = step.generation
        earlier = seen.get(step.number)
        compared = earlier is not None and earlier.excluded == step.excluded and not _is_distrusted(earlier, wrong)
        if earlier is not None and compared and not same(earlier, step):
            conflicts.add(step.number)
        seen[step.number] = history[step.number] = step
    return tuple(history[number] for number in sorted(history)), tuple(sorted(conflicts))


def with_untold(steps: Sequence[Step], events: Iterable[Event]) -> tuple[Step, ...]:
    """Return the steps with those between them that nobody told of, of which states say that they were made.

    Rank 0 may end before it tells of a step. Training goes on from it where another rank has a copy of the whole state.
    How long it took is not known: what the step before it took stands for that.
    """
    by_number = {step.number: step for step in steps}
    for event in events:
        if event.name != "state.restored" or not event.fields.get("loss"):
            continue
        number = int(event.fields["step"])
        before, after = by_number.get(number - 1), by_number.get(number + 1)
        if number not in by_number and before is not None and after is not None:
            by_number[number] = replace(
                before,
                number=number,
                at=event.at,
                loss=str(event.fields["loss"]),
                samples=(before.samples[1], after.samples[0]),
                sample_sum=None,
                excluded=(),
            )
    return tuple(by_number[number] for number in sorted(by_number))


def _is_distrusted(step: Step, wrong: Sequence[tuple[int, int]]) -> bool:
    return any(step.number > last and step.generation < before for last, before in wrong)


def _generations(
    events: Sequence[Event], committed: Sequence[Step], injections: Sequence[Injection], started_at: float | None
) -> tuple[GenerationView, ...]:
    sealed: dict[int, Event] = {}
    sources: dict[int, str] = {}
    for event in events:
        if event.name == "generation.sealed":
            sealed.setdefault(int(event.fields["number"]), event)
        elif event.name == "state.restored" and sources.get(event.generation) != "store":
            sources[event.generation] = str(event.fields["source"])
    views: list[GenerationView] = []
    for number, event in sorted(sealed.items()):
        own = [step for step in committed if step.generation == number]
        before = [step for step in committed if step.generation < number]
        nodes, spares = tuple(event.fields["nodes"]), tuple(event.fields.get("spares") or ())
        cause_at = _cause_at(event, {*nodes, *spares}, views, events, injections, started_at)
        newest = max((step.number for step in before), default=0)
        last = max((step.at for step in before), default=None)
        first = min(own, key=lambda step: step.at) if own else None
        views.append(
            GenerationView(
                number=number,
                cause=str(event.fields["cause"]),
                nodes=nodes,
                spares=spares,
                leader=str(event.fields.get("leader") or event.node),
                layout={axis: int(size) for axis, size in (event.fields.get("layout") or {}).items()},
                detail=str(event.fields.get("detail") or ""),
                sealed_at=event.at,
                restored_from=sources.get(number, ""),
                first_step=first.number if first else None,
                last_step=max((step.number for step in own), default=None),
                steps_repeated=max(0, newest + 1 - first.number) if first else 0,
                planned_repeats=_planned_repeats(views[-1], event, first, events, injections) if views and first else 0,
                seconds_to_first_step=first.at - cause_at if first else None,
                pause=max(0.0, first.at - last - _ordinary(own or before)) if first and last is not None else None,
            )
        )
    return tuple(views)


def _planned_repeats(
    before: GenerationView, sealed: Event, first: Step, events: Sequence[Event], injections: Sequence[Injection]
) -> int:
    if before.last_step is None or sealed.fields["cause"] not in _PLANNED:
        return 0
    exits = [event for event in events if event.name == "trainer.exited" and event.generation == before.number]
    left = [event for event in exits if event.fields.get("kind") == "left"]
    if len(left) != len(exits) or {event.node for event in left} != {*before.nodes}:
        return 0
    asked = min(event.at for event in left) - _LATELY
    if any(one.kind not in _ORDERLY and asked <= one.at <= first.at for one in injections):
        return 0
    return max(0, before.last_step + 1 - first.number)


def _cause_at(
    sealed: Event,
    members: set[str],
    earlier: Sequence[GenerationView],
    events: Sequence[Event],
    injections: Sequence[Injection],
    started_at: float | None,
) -> float:
    if not earlier:
        return events[0].at if started_at is None else started_at
    before = earlier[-1]
    gone = {*before.nodes, *before.spares} - members
    come = members - {*before.nodes, *before.spares}
    changed = {**dict.fromkeys(_TAKES, gone or members), **dict.fromkeys(_BRINGS, come)}
    done = [
        injection.at
        for injection in injections
        if injection.at <= sealed.at and injection.node in changed.get(injection.kind, ())
    ]
    if done:
        return max(done) if come and not gone else min(done)
    noticed = [
        event.at
        for event in events
        if before.sealed_at < event.at <= sealed.at
        and (
            (event.name == "peer.lost" and event.fields.get("peer") in gone)
            or (event.name == "member.joined" and event.node in come)
            or (event.name == "trainer.exited" and event.fields.get("kind") in _FAILURES)
        )
    ]
    return min(noticed, default=sealed.at)


def _ordinary(steps: Sequence[Step]) -> float:
    seconds = sorted(step.seconds for step in steps)
    return seconds[len(seconds) // 2]


def _news(events: Sequence[Event], injections: Sequence[Injection]) -> tuple[tuple[float, str], ...]:
    news = [(injection.at, f"chaos: {injection.kind} {injection.node}".rstrip()) for injection in injections]
    shown: set[tuple[str, Any]] = set()
    for event in events:
        line = _line(event)
        if line is not None and (event.name, line) not in shown:
            shown.add((event.name, line))
            news.append((event.at, line))
    return tuple(sorted(news))


def _line(event: Event) -> str | None:
    fields = event.fields
    match event.name:
        case "member.joined":
            return f"{event.node} joined"
        case "generation.sealed":
            return f"generation {fields['number']} sealed ({fields['cause']}): {', '.join(fields['nodes'])}"
        case "peer.lost":
            return f"{fields['peer']} lost ({fields['evidence']})"
        case "state.restored" if event.rank in (0, None):
            return f"state of step {fields['step']} restored from {fields['source']}"
        case "checkpoint.committed":
            return f"checkpoint of step {fields['step']} committed"
        case "checkpoint.failed":
            return f"checkpoint of step {fields['step']} failed: {fields['error']}"
        case "etcd.lost" | "etcd.back":
            return event.name.replace(".", " ")
        case "trainer.exited" if fields.get("kind") == _ERROR:
            return f"trainer on {event.node} raised: {' '.join(str(fields['error']).strip().splitlines()[-1:])}"
        case _:
            return None
