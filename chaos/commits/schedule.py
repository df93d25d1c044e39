"""Who takes how many turns, and what goes wrong: drawn from a seed, written as text, made smaller when it fails.

A schedule is a text of lines, the first of which describes the run, each other one gives an actor turns:

    run seed=7 ranks=2 generations=2 steps=2 attempts=1 twins=1 readers=1 collectors=1 keep=1 grace=30
    leader1 3
    rank1.0 5 unanswered
    leader1 <swap
    leader2 swap late
    network 1

An actor takes so many store operations, or those up to and with its next one of a kind, or (with `<`) those before that
one; fewer when it waits for another actor or is done. What is named after them happens to the last one. `twin1` is a
second leader of generation 1. `network N` delivers the N-th request that is on its way. After the last line everybody
is given turns until nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from random import Random

from chaos.commits.model import Fault
from chaos.many import shrinking
from chaos.many.shrinking import with_less
from elastic3d.errors import UsageError

NETWORK = "network"
KINDS = ("get", "read", "size", "put", "create", "swap", "list", "delete")
MOST = 200
"""Turns of a line without a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The run that is simulated. keep: checkpoints that collectors keep. grace: theirs, in operations.

    slow: readers that announce themselves and read for long.
    """

    seed: int
    ranks: int = 2
    generations: int = 2
    steps: int = 2
    attempts: int = 1
    twins: int = 0
    readers: int = 0
    collectors: int = 0
    keep: int = 1
    grace: int = 30
    slow: int = 0

    def __str__(self) -> str:
        return "run " + " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @property
    def actors(self) -> tuple[str, ...]:
        """The names of all actors but the network, generation by generation."""
        names: list[str] = []
        for generation in range(1, self.generations + 1):
            names.append(f"leader{generation}")
            names += [f"twin{generation}"] * (generation <= self.twins)
            names += [f"rank{generation}.{rank}" for rank in range(self.ranks)]
        names += [f"reader{number}" for number in range(self.readers)]
        names += [f"slow{number}" for number in range(self.slow)]
        names += [f"collector{number}" for number in range(self.collectors)]
        return tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Give an actor turns, the last one perhaps with a fault.

    With a `kind` of operation they end with the next one of it, or `short` of that.
    """

    actor: str
    turns: int = MOST
    kind: str = ""
    short: bool = False
    fault: Fault = Fault.NONE

    def __str__(self) -> str:
        count = "<" * self.short + self.kind if self.kind else str(self.turns)
        return f"{self.actor} {count} {self.fault}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A run, and who takes turns in it, in order."""

    job: Job
    lines: tuple[Turns, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (self.job, *self.lines)))


def parse(text: str) -> Schedule:
    """Return the schedule of a text; lines that begin with `#` are comments. UsageError where a line is none."""
    job: Job | None = None
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        first, *words = line.split()
        if first.startswith("#"):
            continue
        try:
            if first == "run":
                job = Job(**{name: int(value) for name, _, value in (word.partition("=") for word in words)})
            else:
                lines.append(_turns(first, *words))
        except (ValueError, TypeError, IndexError):
            raise UsageError(
                f"schedule: {line!r} is no line of a schedule; expected such as `rank1.0 5 unanswered`"
            ) from None
    if job is None:
        raise UsageError("schedule: it has no line that begins with `run`")
    return Schedule(job=job, lines=tuple(lines))


def _turns(actor: str, count: str, fault: str = "") -> Turns:
    kind = count.removeprefix("<")
    if kind in KINDS:
        return Turns(actor=actor, kind=kind, short=count != kind, fault=Fault(fault))
    return Turns(actor=actor, turns=int(count), fault=Fault(fault))


# A few operations decide: about half of all lines end at one of these.
_OF_LEADERS = ("swap", "swap", "create", "read")
_OF_RANKS = ("put", "create")
_OF_COLLECTORS = ("swap", "swap", "swap", "delete", "list", "read")

_FAULTS = {
    Fault.DIE_BEFORE: 2, Fault.DIE_AFTER: 2, Fault.LOST: 2, Fault.UNANSWERED: 4, Fault.TWICE: 3, Fault.LATE: 4,
    Fault.ECHO: 2, Fault.STALE: 3,
}  # fmt: skip


def draw(seed: int) -> Schedule:
    """Return a random schedule: up to three generations, whose actors meet where one follows the other."""
    random = Random(f"commits {seed}")
    generations = random.choice((1, 2, 2, 2, 3))
    job = Job(
        seed=seed,
        ranks=random.choice((1, 2, 2, 3)),
        generations=generations,
        steps=random.choice((1, 2, 2, 3)) if generations < 3 else random.choice((1, 2)),
        attempts=random.choice((1, 1, 1, 2)),
        twins=random.choice((0, 0, 1, generations)),
        readers=random.choice((0, 0, 1)),
        collectors=random.choice((0, 1, 1, 2)),
        keep=random.choice((1, 1, 2)),
        grace=random.choice((0, 0, 5, 20, 60)),
        slow=Random(f"slow {seed}").choice((0, 0, 1)),
    )
    names = job.actors
    faults, weights = list(_FAULTS), list(_FAULTS.values())
    trouble = random.choice((0.0, 0.05, 0.15, 0.3))
    longest = random.choice((2, 6, 12))
    count = random.randint(8, 40 if longest > 2 else 70)
    lines = []
    for place in range(count):
        if random.random() < 0.07:
            lines.append(Turns(actor=NETWORK, turns=random.randint(1, 3)))
            continue
        # Those of the first generation are likely at the beginning, those of the last at the end.
        present = 0.5 + generations * place / count
        chances = [_chance(name, present) for name in names]
        fault = random.choices(faults, weights)[0] if random.random() < trouble else Fault.NONE
        lines.append(_drawn(random, random.choices(names, chances)[0], longest, fault))
    return Schedule(job=job, lines=tuple(lines))


def _drawn(random: Random, actor: str, longest: int, fault: Fault) -> Turns:
    if actor.startswith("collector") and random.random() < 0.4:
        # A whole collection at once, while others are in the middle of something.
        return Turns(actor=actor, turns=random.randint(10, 60), fault=fault)
    if actor.startswith(("reader", "slow")) or random.random() < 0.5:
        return Turns(actor=actor, turns=random.randint(1, longest), fault=fault)
    of = {"r": _OF_RANKS, "c": _OF_COLLECTORS}.get(actor[0], _OF_LEADERS)
    short = not fault and random.random() < 0.4
    return Turns(actor=actor, kind="list" if fault is Fault.STALE else random.choice(of), short=short, fault=fault)


def _chance(name: str, present: float) -> float:
    kind = name.rstrip("0123456789.")
    if kind in ("reader", "slow", "collector"):
        return 0.35
    generation = int(name.removeprefix(kind).partition(".")[0])
    return float(0.08 ** abs(generation - present)) * (1.5 if kind in ("leader", "twin") else 1.0)


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], *, tries: int = 600) -> Schedule:
    """Return a smaller schedule that still fails: fewer lines, fewer turns, fewer faults, fewer actors."""
    return shrinking.shrink(schedule, _smaller, fails, tries=tries)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    lines = schedule.lines
    for fewer in with_less(lines):
        yield replace(schedule, lines=fewer)
    least = {
        "ranks": 1,
        "generations": 1,
        "steps": 1,
        "attempts": 1,
        "twins": 0,
        "readers": 0,
        "slow": 0,
        "collectors": 0,
    }
    for name, value in least.items():
        if getattr(schedule.job, name) > value:
            yield replace(schedule, job=replace(schedule.job, **{name: getattr(schedule.job, name) - 1}))
    for at, line in enumerate(lines):
        simpler = []
        if (
            at + 1 < len(lines)
            and lines[at + 1].actor == line.actor
            and not (line.fault or line.kind or lines[at + 1].kind)
            and line.actor != NETWORK
        ):
            joined = replace(lines[at + 1], turns=line.turns + lines[at + 1].turns)
            yield replace(schedule, lines=(*lines[:at], joined, *lines[at + 2 :]))
        if line.fault:
            simpler.append(replace(line, fault=Fault.NONE))
        if line.turns > 1 and not line.kind:
            simpler += [replace(line, turns=turns) for turns in sorted({1, line.turns // 2, line.turns - 1})]
        for one in simpler:
            yield replace(schedule, lines=(*lines[:at], one, *lines[at + 1 :]))
