"""What the events of a long job promise, without keeping them all.

`picture` and the judge look at all events of a job again and again, which is right for minutes and not for days. Here
the picture is one of the latest generations, and of older steps only how many samples they have consumed is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos.faults.catalogue import KINDS
from chaos.history.claims import ACCUSING, Commit, accusations, commits, losses
from chaos.history.follow import Event, GenerationView, Injection, Picture, Step, as_step, lineage, picture

RECENT = 1000
"""Events that the picture is made of, beside those that sealed the latest generations."""
GENERATIONS = 4
REACH = 2000
"""Steps below the newest one that may be done again and still be compared with how they were done before."""
_ERRORS = 20
_NOTED = frozenset((*ACCUSING, "peer.lost", "job.ended", *(kind.ABOUT.detector for kind in KINDS.values())))
"""Events of which all are kept: some of each fault, and none of a step; of those that seal a generation, the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is kept of a generation. repeated: steps it made again."""

    cause: str
    repeated: int


class Account:
    """The account of a job; call `hear` with its events in order, and read the rest."""

    def __init__(self) -> None:
        self.picture = Picture()
        self.generations: dict[int, Known] = {}
        self.broken: list[str] = []
        self._events: list[Event] = []
        self._steps: list[Step] = []
        self._planned: dict[int, GenerationView] = {}
        self._errors: list[str] = []
        self._conflicts: set[int] = set()
        self._checkpoint = 0
        self._done: Step | None = None
        self._noted: list[Event] = []
        self._last: Event | None = None
        self._sealed: set[int] = set()
        self._commits: list[Commit] = []
        self._rollbacks = 0

    def hear(self, events: Sequence[Event], injections: Sequence[Injection]) -> None:
        """Take new events into the account. injections: those of the last minutes."""
        latest = picture(events)
        self._errors = [*self._errors, *latest.errors][-_ERRORS:]
        self._checkpoint = max(self._checkpoint, *latest.checkpoints, 0)
        self._events = self._latest([*self._events, *events])
        self._commits += commits(events, generation=max(self._sealed, default=0), rollbacks=self._rollbacks)
        self._rollbacks += sum(event.name == "etcd.rolled_back" for event in events)
        self._note(events)
        self.picture = picture(self._events, injections)
        for view in self.picture.generations:
            before = self.generations.get(view.number)
            repeated = max(view.steps_repeated, before.repeated if before else 0)
            self.generations[view.number] = Known(cause=view.cause, repeated=repeated)
            if view.planned_repeats:
                self._planned[view.number] = view
        self._conflicts.update(self.picture.conflicts)
        self._take([as_step(event) for event in events if event.name == "step.committed"])

    def whole(self) -> Picture:
        """Return a picture of the whole job that the judge can look at: older steps are one, of all their samples."""
        steps, conflicts = lineage(self._steps)
        noted = self.noted
        return replace(
            self.picture,
            generations=tuple(self._planned.values()),
            steps=(*([self._done] if self._done else []), *steps),
            conflicts=tuple(sorted({*self._conflicts, *conflicts})),
            errors=tuple(self._errors),
            checkpoints=(self._checkpoint,) if self._checkpoint else (),
            commits=tuple(self._commits),
            accused=accusations(noted),
            lost=losses(noted),
        )

    @property
    def noted(self) -> tuple[Event, ...]:
        """The events by which a judge tells who noticed what: those of detectors, of generations, and the last step."""
        return tuple(sorted([*self._noted, *([self._last] if self._last else [])], key=lambda event: event.at))

    @property
    def wrong(self) -> str:
        """What is wrong already, "" where nothing is."""
        if self._conflicts:
            return f"step {min(self._conflicts)} was done again with other bits"
        return self.broken[0] if self.broken else ""

    def _note(self, events: Sequence[Event]) -> None:
        """Keep what says who was named as being at fault, and who was taken for dead."""
        for event in events:
            if event.name == "generation.sealed" and int(event.fields["number"]) not in self._sealed:
                self._sealed.add(int(event.fields["number"]))
                self._noted.append(event)
            elif event.name == "step.committed":
                self._last = event if self._last is None or event.at > self._last.at else self._last
            elif event.name in _NOTED:
                self._noted.append(event)

    def _latest(self, events: list[Event]) -> list[Event]:
        if len(events) <= 2 * RECENT:
            return events
        sealed = [event for event in events[:-RECENT] if event.name == "generation.sealed"]
        newest = max((int(event.fields["number"]) for event in events if event.name == "generation.sealed"), default=0)
        return [event for event in sealed if int(event.fields["number"]) > newest - GENERATIONS] + events[-RECENT:]

    def _take(self, steps: Sequence[Step]) -> None:
        done = self._done.number if self._done else 0
        for step in steps:
            if step.number <= done:
                self.broken.append(f"step {step.number} was done again, more than {REACH} steps after it")
        self._steps += steps
        if len(self._steps) > 2 * REACH:
            self._settle()

    def _settle(self) -> None:
        """Make one step of those that nobody goes back to."""
        history, conflicts = lineage(self._steps)
        self._conflicts.update(conflicts)
        mark = history[-1].number - REACH
        for step in history:
            if step.number > mark:
                break
            reach = self._done.samples[1] if self._done else 0
            if step.samples[0] != reach:
                self.broken.append(f"step {step.number} begins with sample {step.samples[0]}, not {reach}")
            self._done = replace(step, samples=(0, step.samples[1]))
        self._steps = [step for step in self._steps if step.number > mark]
