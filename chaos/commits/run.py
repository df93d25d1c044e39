"""Playing schedules of the commit protocol: one, or random ones by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chaos.commits.actors import Cast
from chaos.commits.invariants import Checker
from chaos.commits.model import Fault, ModelStore
from chaos.commits.production import alone
from chaos.commits.schedule import NETWORK, Schedule, Turns, draw, shrink
from chaos.many import runs as many

_OPERATIONS = 20_000
"""Operations of one schedule; a run with more never settles."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one schedule. lines: its last operations."""

    schedule: Schedule
    violations: list[str]
    operations: int
    commits: int
    refusals: int
    lines: list[str] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """The counts to be added up over many schedules."""
        return {"operations": self.operations, "commits": self.commits, "refusals": self.refusals}

    def report(self) -> str:
        """Return text to paste into a test: the schedule, the violations, and the operations that led to them."""
        said = [f"# {line}" for line in (*self.lines[-25:], *(f"VIOLATED {v}" for v in self.violations[:5]))]
        return "\n".join((f"# seed {self.schedule.job.seed}", str(self.schedule), *said))

    def document(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        fields: dict[str, object] = {"seed": self.schedule.job.seed, "schedule": str(self.schedule)}
        return fields | {"violations": self.violations, "operations": self.lines}


def play(schedule: Schedule, *, store: ModelStore | None = None) -> Outcome:
    """Play one schedule to its end, or to the first violation. A given `store` is an empty one with a planted bug."""
    job = schedule.job
    store = store or ModelStore()
    checker = Checker(store, job.keep)
    with alone(job.seed):
        cast = Cast(job, store, checker)
        try:
            for line in schedule.lines:
                if not checker.violations:
                    _give(cast, store, line)
            _settle(cast, store, checker)
            _afterwards(cast, store, checker)
        finally:
            for actor in cast.actors.values():
                actor.end()
    return Outcome(
        schedule=schedule,
        violations=checker.violations,
        operations=store.operations,
        commits=checker.commits,
        refusals=checker.refusals,
        lines=list(store.lines),
    )


def _give(cast: Cast, store: ModelStore, line: Turns) -> None:
    if line.actor == NETWORK:
        store.deliver(line.turns - 1)
        return
    actor = cast.actors.get(line.actor)
    if actor is not None and actor.ready:
        cast.seat(line.actor).fault = line.fault
        actor.run(line.turns, through="" if line.short else line.kind, before=line.kind if line.short else "")
        cast.seat(line.actor).fault = Fault.NONE


def _settle(cast: Cast, store: ModelStore, checker: Checker) -> None:
    """Give turns to all actors and deliver requests under way, until nothing is left to do."""
    while not checker.violations:
        ready = [actor for actor in cast.actors.values() if actor.ready]
        for actor in ready:
            if actor.ready and not checker.violations:
                actor.run(20)
        for actor in cast.actors.values():
            if actor.error is not None:
                checker.violated(f"{actor.name} failed: {type(actor.error).__name__}: {actor.error}")
                actor.error = None
        if not ready and not _go_on(cast, store):
            break
        if store.operations > _OPERATIONS:
            checker.violated(f"more than {_OPERATIONS} operations: it does not come to rest")
    if not checker.violations:
        for actor in cast.actors.values():
            if not actor.over:
                checker.violated(f"{actor.name} waits for ever")


def _go_on(cast: Cast, store: ModelStore) -> bool:
    """Deliver a request under way, or let time pass until an actor wakes; False if there is neither."""
    alarms = [at for name, at in store.alarms.items() if not cast.actors[name].over]
    if store.late:
        store.deliver(0)
        return True
    if alarms:
        store.now = max(store.now, min(alarms))
    return bool(alarms)


def _afterwards(cast: Cast, store: ModelStore, checker: Checker) -> None:
    """Once all faults are over the next generation commits, whatever state it inherited."""
    if checker.violations:
        return
    last = cast.generation(max(cast.generations) + 1, 1)
    _settle(cast, store, checker)
    if not checker.violations and not any(name in checker.committed for name in last.committed):
        checker.violated(f"generation {last.number} had no trouble, and committed nothing")
    if not checker.violations and "collector1" in cast.actors:
        for _ in range(2):
            # Long enough to outlast dead collectors and what they condemned.
            store.now += 2 * 86_400.0
            cast.collector("collector of the rest", 4)
            _settle(cast, store, checker)
        checker.clean()


def play_many(
    first: int, count: int, *, most: int = 3, played: Callable[[int], None] = lambda done: None
) -> many.Tally[Outcome]:
    """Play the schedules drawn from `count` seeds, from `first` on; stop after `most` failures, and make them small."""
    return many.play_many(lambda seed: play(draw(seed)), smallest, first=first, count=count, most=most, played=played)


def smallest(outcome: Outcome, *, store: Callable[[], ModelStore] = ModelStore) -> Outcome:
    """Return the outcome of a smaller schedule with a violation of the same kind."""

    def fresh(schedule: Schedule) -> Outcome:
        return play(schedule, store=store())

    return fresh(shrink(outcome.schedule, many.alike(outcome, fresh, _kind)))


def _kind(violation: str) -> str:
    """Return the text of a violation without names and numbers."""
    words = violation.partition(": ")[2].split()
    return " ".join([word for word in words if word.isalpha()][:5])
