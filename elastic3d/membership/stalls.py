"""What a node says of its ranks while nothing moves, and what a judge makes of it: plain values.

A node whose trainer has been silent for longer than its deadline writes one `Stall`, under its lease, and takes it back
when a trainer moves again. The leader hands those of all nodes to a `Judge`; what that finds holds for the generation
it names and dies with it. Judges are handed in, as the planner is: membership knows none of their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic3d.values import Generation


class RankState(StrEnum):
    """How a silent rank's processes are, as its node's kernel sees them."""

    IDLE = "idle"  # no processor time and no input or output to speak of
    BUSY = "busy"
    STOPPED = "stopped"  # state T: somebody sent SIGSTOP, or a debugger holds it
    BLOCKED = "blocked"  # state D: it waits within the kernel, and cannot be killed meanwhile
    HELD = "held"  # it is not stopped, but none of its threads gets to run Python: something holds the interpreter
    DEAD = "dead"  # it is gone, and this is what it recorded last


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCount:
    """How many operations of one axis a rank has posted and seen done. axis: the name of a `health.phases.Axis`.

    fingerprint: of the last one posted: its operation, dtype, sizes and root, 0 for none.
    """

    axis: str
    posted: int
    done: int
    fingerprint: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The operation that a rank waits for: the `number`-th, counted from 1, that it posted on this axis."""

    axis: str
    number: int
    fingerprint: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStall:
    """One rank of a node that stands still. Times are in milliseconds when this was written.

    step: the newest step it made, -1 for none; made: how many it made in this generation. phase: the name of a
    `health.phases.Phase`. chunk, unit: of the model, -1 where it was at none. silent: since its last sign of progress;
    allowed: how long it may be silent in this phase while idle, and while busy. beat: since a thread of it last ran
    Python. cpu: processor time its process group used, and io: bytes it read and wrote, within the last 2 s of its
    silence. axes: those on which it posted anything. wait: what it waits for, None if it is in no collective. odd:
    where its present step is no beginning of its last one, in words, "" if it is or cannot be compared. wchan: where
    in the kernel it waits, "" if unknown. top_frame: where its main thread is, "" if unknown. loader_moves: whether
    processes that it started, such as a data loader's workers, use the processor or read. source: what its data loader
    waits for, a URL or the name of a class, "" if unknown.
    """

    rank: int
    step: int
    made: int
    phase: str
    silent: int
    allowed_idle: int
    allowed_busy: int
    beat: int
    state: RankState
    cpu: int = 0
    io: int = 0
    chunk: int = -1
    unit: int = -1
    axes: tuple[AxisCount, ...] = ()
    wait: Wait | None = None
    odd: str = ""
    wchan: str = ""
    top_frame: str = ""
    loader_moves: bool = False
    source: str = ""

    @property
    def where(self) -> str:
        """Where the rank is, in words: its code, and the source that its data loader waits for; "" if unknown."""
        return "; ".join(filter(None, (self.top_frame, f"waits for {self.source}" if self.source else "")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """What a node says of its ranks in the generation `key` while one of them stands still; all its ranks are named."""

    incarnation: str
    key: str
    ranks: tuple[RankStall, ...]


class VerdictKind(StrEnum):
    """What kind of trouble a verdict is about."""

    STUCK = "stuck"
    SLOW = "slow"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge found about the generation `key`.

    fault: the class of the fault, in the judge's words, such as "stopped" or "left the program". culprits: ids of the
    nodes, ranks: their ranks that are at fault; both empty where nobody can be singled out, as in a deadlock. program:
    the script's code is at fault rather than the node, and may do the same again at this place. act: whether the
    generation has to end; False for what is only reported, as that everybody waits for the store. confidence: from 0
    to 1. detail: for people, one sentence. waits: who waits for whom, one line each. silent: for how many seconds each
    rank had been silent, by rank.

    Of slow nodes, fault is what is done about them. before, after: predicted seconds of a step without it and with it.
    rungs: what could be done, and what each would gain and cost, one line each.

    Where memory ran out, fault is the rung that is taken, "none" for none.
    """

    kind: VerdictKind
    fault: str
    key: str
    step: int
    detail: str
    culprits: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    program: bool = False
    act: bool = True
    confidence: float = 1.0
    waits: tuple[str, ...] = ()
    silent: tuple[float, ...] = ()
    before: float = 0.0
    after: float = 0.0
    rungs: tuple[str, ...] = ()


def after_step(step: int) -> str:
    """Return when it was that a generation's newest step was `step`, in words; -1: it had made none."""
    return f"after step {step}" if step >= 0 else "before the first step of its generation"


Judge = Callable[[Generation, Mapping[str, Stall], float], Verdict | None]
"""(the sealed generation, the stall of each node by its id, seconds since the last of them changed) -> verdict.

Only stalls of this generation are passed, of active nodes that are not out, and perhaps not of all of them. Their times
of silence are those of this moment (`aged`), and do not count as a change (`outline`). None while nothing can be said:
not all have spoken, somebody moves, or a deadline is not over.
"""


MOVES = 1000
"""Milliseconds: a rank with a sign of progress within them, when that was written, moves."""

COMPUTES = 200
"""Milliseconds of processor time, of the last 2 s, from which on a rank computes something."""


def outline(stall: Stall) -> Stall:
    """Return a stall without what passes or varies while nothing happens: two with one outline say the same."""

    def lasting(rank: RankStall) -> RankStall:
        moves, computes = rank.silent < MOVES, rank.cpu >= COMPUTES
        return replace(rank, silent=0 if moves else MOVES, beat=0, cpu=COMPUTES if computes else 0, io=0)

    return replace(stall, ranks=tuple(map(lasting, stall.ranks)))


def aged(stall: Stall, seconds: float) -> Stall:
    """Return a stall that was true so many seconds ago as it is now, if none of its silent ranks has moved since."""
    more = int(seconds * 1000)
    if more <= 0:
        return stall

    def now(rank: RankStall) -> RankStall:
        if rank.silent < MOVES:
            return rank
        return replace(rank, silent=rank.silent + more, beat=rank.beat + more * _held(rank))

    return replace(stall, ranks=tuple(map(now, stall.ranks)))


def suspected(rank: RankStall) -> bool:
    """Return whether a rank may be at fault: it is silent, and waits for no other rank or something is odd about it.

    A stall names all ranks of a node: those that move beside a silent one are what it waits for, and nothing is wrong.
    """
    if rank.silent < MOVES and rank.state is not RankState.DEAD:
        return False
    waits = rank.wait is not None and rank.state in (RankState.IDLE, RankState.BUSY)
    return not waits or bool(rank.odd)


def _held(rank: RankStall) -> bool:
    """Return whether no thread of a rank gets to run Python; else the time since one did does not grow."""
    return rank.state in (RankState.HELD, RankState.STOPPED, RankState.DEAD)
