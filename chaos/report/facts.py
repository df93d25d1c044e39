"""What a report tells of a run: plain values, kept beside it as JSON, from which the page can be made at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest

from chaos.faults.fault import Fault
from chaos.history.follow import Event, GenerationView
from chaos.judging.notices import Notice
from chaos.judging.oracle import Verdict
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from chaos.report.moments import Moment, moments
from chaos.report.view import layout

SCHEMA = 1


class Fate(StrEnum):
    """What became of a fault of the schedule."""

    MADE = "made"
    SKIPPED = "skipped"
    MISSED = "missed"


class Role(StrEnum):
    """What a node is for a while."""

    ACTIVE = "active"
    SPARE = "spare"
    COMING = "coming"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFact:
    """A fault of the schedule. number: from 1. node: that it happened to, "" for the whole job. at: by the wall clock.

    why: it was skipped. noticed, next_step: seconds from it to the detector's first event, and to the next step.
    The rest is the catalogue's.
    """

    number: int
    text: str
    fate: Fate
    node: str = ""
    at: float | None = None
    why: str = ""
    promised: str
    page: str
    row: str
    detector: str
    bar: float
    noticed: float | None = None
    next_step: float | None = None
    replay: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFact:
    """A generation; times by the wall clock. caused_at: of what led to it. first_at: of its first step."""

    number: int
    cause: str
    detail: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    layout: str
    sealed_at: float
    caused_at: float | None
    first_at: float | None
    first_step: int | None
    repeated: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A node's part in a generation, from `begin` to `end` by the wall clock."""

    node: str
    generation: int
    role: Role
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFact:
    """A committed step. loss: as hex text. counts: it is part of the history that counts, and was not made again."""

    number: int
    generation: int
    at: float
    loss: str
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """A curve of losses, as hex text, by step."""

    steps: tuple[int, ...] = ()
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a report tells of a run. began, ended: by the wall clock. steps: that the job should make.

    seed: the job's. drawn_from: the schedule's seed, None where it has none. quiet: the losses of the undisturbed run.
    logs: by node, the end of what an agent printed that ended badly. same_bits, tolerance, same_losses: as a verdict's.
    """

    script: str
    arguments: tuple[str, ...] = ()
    nodes: int
    slots: int
    seed: int
    began: float
    ended: float
    steps: int
    same_bits: bool | None
    faults: tuple[FaultFact, ...]
    promises: tuple[Promise, ...]
    generations: tuple[GenerationFact, ...]
    made: tuple[StepFact, ...]
    spans: tuple[Span, ...]
    moments: tuple[Moment, ...]
    quiet: Points = field(default_factory=Points)
    logs: dict[str, str] = field(default_factory=dict)
    drawn_from: int | None = None
    tolerance: float | None = None
    same_losses: bool | None = None
    schema: int = SCHEMA

    @property
    def broken(self) -> tuple[Promise, ...]:
        """The promises that were broken."""
        return tuple(promise for promise in self.promises if promise.broken)

    @property
    def skipped(self) -> tuple[FaultFact, ...]:
        """The faults that were not tried."""
        return tuple(fault for fault in self.faults if fault.fate is Fate.SKIPPED)

    @property
    def origin(self) -> float:
        """Return when the picture of the run begins: when its first generation was sealed."""
        times = [one.sealed_at for one in self.generations[:1]]
        times += [fault.at for fault in self.faults if fault.at is not None]
        return min(times, default=self.began)


def facts(
    outcome: Outcome,
    verdict: Verdict,
    events: Sequence[Event],
    *,
    script: str,
    arguments: tuple[str, ...],
    faults: Sequence[Fault],
    skipped: Sequence[tuple[Fault, str]],
    noticed: Sequence[Notice],
    quiet: Points | None = None,
) -> RunFacts:
    """Return what is to be told of a run. faults: of its schedule, in order. events: of all nodes, in order."""
    views = outcome.picture.generations
    made = tuple(_steps(outcome, events))
    generations = tuple(_generation(view, made) for view in views)
    ended = max([event.at for event in events] + [at for _, at in outcome.made], default=0.0)
    starts = [one.caused_at for one in generations[:1] if one.caused_at is not None]
    began = min([*starts, *(event.at for event in events[:1])], default=ended)
    shown_faults = tuple(_faults(faults, outcome, skipped, noticed, made))
    return RunFacts(
        script=script,
        arguments=arguments,
        nodes=outcome.setting.nodes,
        slots=outcome.setting.slots,
        seed=outcome.setting.seed,
        began=began,
        ended=ended,
        steps=outcome.setting.steps,
        same_bits=verdict.same_bits,
        tolerance=verdict.tolerance,
        same_losses=verdict.same_losses,
        faults=shown_faults,
        promises=verdict.promises,
        generations=generations,
        made=made,
        spans=tuple(_spans(views, events, shown_faults, ended)),
        moments=moments(events),
        quiet=quiet or Points(),
        logs=dict(outcome.logs),
    )


def _generation(view: GenerationView, made: Sequence[StepFact]) -> GenerationFact:
    first_at = min((step.at for step in made if step.generation == view.number), default=None)
    return GenerationFact(
        number=view.number,
        cause=view.cause,
        detail=view.detail,
        nodes=view.nodes,
        spares=view.spares,
        layout=layout(view),
        sealed_at=view.sealed_at,
        caused_at=None
        if first_at is None or view.seconds_to_first_step is None
        else first_at - view.seconds_to_first_step,
        first_at=first_at,
        first_step=view.first_step,
        repeated=view.steps_repeated,
        source=view.restored_from,
    )


def _steps(outcome: Outcome, events: Sequence[Event]) -> Iterator[StepFact]:
    counting = {(step.number, step.generation) for step in outcome.picture.steps}
    for event in events:
        if event.name == "step.committed":
            number = int(event.fields["step"])
            yield StepFact(
                number=number,
                generation=event.generation,
                at=event.at,
                loss=str(event.fields["loss"]),
                counts=(number, event.generation) in counting,
            )


def _faults(
    faults: Sequence[Fault],
    outcome: Outcome,
    skipped: Sequence[tuple[Fault, str]],
    noticed: Sequence[Notice],
    made: Sequence[StepFact],
) -> Iterator[FaultFact]:
    # Equal faults may be there more than once: each is told of one of those that were made.
    left = list(outcome.made)
    hit = [*outcome.hit, *[""] * (len(left) - len(outcome.hit))]
    heard, skips = list(noticed), list(skipped)
    for number, fault in enumerate(faults, 1):
        about = fault.ABOUT
        why = next((why for one, why in skips if one == fault), None)
        place = next((place for place, (one, _) in enumerate(left) if one == fault), None)
        at, node, after = None, "", None
        if why is not None:
            skips.remove((fault, why))
        elif place is not None:
            at, node = left.pop(place)[1], hit.pop(place)
            notice = next((one for one in heard if one.fault == fault), None)
            if notice is not None:
                heard.remove(notice)
                after = notice.after
        yield FaultFact(
            number=number,
            text=str(fault),
            fate=Fate.SKIPPED if why is not None else Fate.MISSED if at is None else Fate.MADE,
            node=node,
            at=at,
            why=why or "",
            promised=about.promised,
            page=about.page,
            row=about.row,
            detector=about.detector,
            bar=about.bar,
            noticed=after,
            next_step=None if at is None else min((step.at - at for step in made if step.at > at), default=None),
            replay=about.replay.value,
        )


_DEATHS = ("peer.lost", "slot.failed")


def _spans(
    views: Sequence[GenerationView], events: Sequence[Event], faults: Sequence[FaultFact], ended: float
) -> Iterator[Span]:
    lost = [(str(event.fields.get("peer")), event.at) for event in events if event.name == "peer.lost"]
    lost += [(event.node, event.at) for event in events if event.name == "job.ended"]
    lost += [(fault.node, fault.at) for fault in faults if fault.detector in _DEATHS and fault.at is not None]
    came = [(event.node, event.at) for event in events if event.name == "member.joined"]
    known: set[str] = set()
    for view, following in zip_longest(views, views[1:]):
        begin, end = view.sealed_at, following.sealed_at if following is not None else ended
        for node in (*view.nodes, *view.spares):
            gone = min((at for name, at in lost if name == node and begin <= at < end), default=end)
            role = Role.ACTIVE if node in view.nodes else Role.SPARE
            joined = max((at for name, at in came if name == node and at <= begin), default=begin)
            if node not in known and joined < begin and known:
                yield Span(node=node, generation=view.number, role=Role.COMING, begin=joined, end=begin)
            yield Span(node=node, generation=view.number, role=role, begin=begin, end=gone)
        known = {*view.nodes, *view.spares}
