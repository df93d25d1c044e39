"""From what all nodes say of their silent ranks to who holds the job up: one pure function.

Every chain of waiting ends somewhere: at a rank that waits for nobody (it computes, loads, sleeps, or is stopped), at
an operation that all have posted and that does not end (the network, or operations that do not fit together), or in
itself (ranks that wait for each other, since one of them left the program that it shares with the others).

Two rules keep the healthy from being named. While any rank moves, or any node has not spoken, nobody is. And a rank
that merely looks idle may wait by means that nobody records, such as a collective within a layer or a store: it is
named only once all ranks that wait for nobody are past their deadlines, and not where many nodes stand at the same.
What the kernel says of a stopped process, and an interpreter that runs no thread, are certain, and need neither.

A rank's own last step says best which rank left the program: with two data-parallel ranks, nothing else can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.health.phases import Axis, Phase
from elastic3d.health.waits import Operation, WaitGraph, done, newest_fingerprint, posted, wait_graph
from elastic3d.membership.stalls import RankStall, RankState, Stall, Verdict, VerdictKind, after_step
from elastic3d.planner import place_of
from elastic3d.values import Generation

MOVING = 1000
"""Milliseconds: a rank with a sign of progress within them moves, and while one does nobody is named."""

MANY, MANY_SHARE = 2, 0.1
"""Where more nodes than both of these stand at the same, what they all use is to blame, and not they."""

BUSY = 200
"""Milliseconds of processor time within the last 2 s from which on a rank computes."""

PATIENT = 10
"""Times a busy rank's own limit for which its work between steps, or that of all ranks alike, is only reported: scripts
evaluate and compile, and one that does so at every turn would lose its nodes one after the other."""

LINES = 64
"""How many lines of who waits for whom a verdict carries."""


class Fault(StrEnum):
    """What holds a job up: the classes of a verdict of being stuck."""

    STOPPED = "stopped"
    HELD = "interpreter held"
    BLOCKED = "blocked in the kernel"
    LOADER = "data loader"
    USER = "user code"
    COPY = "copy"
    START = "start"
    RESTORE = "restore"
    IDLE = "idle"
    SPINNING = "spinning"
    LEFT = "left the program"
    MISMATCH = "mismatch"
    LINK = "link"
    DEADLOCK = "deadlock"
    STALLED = "stalled"

    @property
    def of_program(self) -> bool:
        """Whether the script's own code is at fault, which runs on any node."""
        return self in (Fault.LEFT, Fault.MISMATCH, Fault.DEADLOCK)


_BY_PHASE = {
    Phase.DATA: Fault.LOADER,
    Phase.USER: Fault.USER,
    Phase.PAUSE: Fault.USER,
    Phase.COPY: Fault.COPY,
    Phase.START: Fault.START,
    Phase.RESTORE: Fault.RESTORE,
    Phase.LEAVE: Fault.LEFT,
}

# Where all ranks may rightly stand at once: waiting for what they all use, or in the script's own code.
_OUTSIDE = (Phase.DATA, Phase.USER, Phase.PAUSE, Phase.COPY, Phase.START, Phase.RESTORE)


def judge(generation: Generation, stalls: Mapping[str, Stall], since: float) -> Verdict | None:
    """Return who holds up `generation`; None while that cannot be said. A `Judge` of `membership.stalls`.

    stalls: by the node's id, their times those of now. since: seconds since the last of them changed; it does not
    matter here, since each silence says for itself how long it lasts.
    """
    case = _Case.of(generation, stalls)
    if case is None or any(rank.silent < MOVING for rank in case.living()):
        return None
    if any(rank.state is RankState.DEAD for rank in case.ranks.values()):
        # Whoever lost a peer comes back by itself; only what their records show of the program is worth a word.
        return _odd(case) or _unlike(case, case.graph.waits)
    sinks = [number for number in case.ranks if case.waits_for_nobody(number)]
    return _stands(case, sinks) if sinks else _waits(case)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One generation that stands still. nodes: ids by rank."""

    generation: Generation
    ranks: Mapping[int, RankStall]
    nodes: Mapping[int, str]
    graph: WaitGraph

    @classmethod
    def of(cls, generation: Generation, stalls: Mapping[str, Stall]) -> _Case | None:
        """Return the case; None where a node has not spoken of all its ranks in this generation."""
        layout = generation.layout
        if layout is None or layout.world != generation.world or layout.world == 0:
            return None
        ranks: dict[int, RankStall] = {}
        nodes: dict[int, str] = {}
        for node in generation.nodes:
            stall = stalls.get(node.id)
            if stall is None or stall.key != generation.key:
                return None
            own = range(len(nodes), len(nodes) + len(node.slots))
            if {rank.rank for rank in stall.ranks} != set(own):
                return None
            ranks.update((rank.rank, rank) for rank in stall.ranks)
            nodes.update(dict.fromkeys(own, node.id))
        ranks = {number: ranks[number] for number in sorted(ranks)}
        graph = wait_graph(layout, ranks)
        return cls(generation=generation, ranks=ranks, nodes=nodes, graph=graph)

    def living(self) -> Iterable[RankStall]:
        return (rank for rank in self.ranks.values() if rank.state is not RankState.DEAD)

    def waits_for_nobody(self, number: int) -> bool:
        """Whether the reason lies in the rank itself, even if it is within an operation."""
        rank = self.ranks[number]
        return rank.wait is None or rank.state in (RankState.STOPPED, RankState.HELD, RankState.BLOCKED)

    def due(self, number: int, *, idle: bool = False) -> bool:
        """Whether a rank has been silent for as long as it may be; idle: whatever it uses of the processor."""
        rank = self.ranks[number]
        allowed = rank.allowed_busy if _busy(rank) and not idle else rank.allowed_idle
        return rank.silent >= allowed

    def nodes_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.nodes[number] for number in sorted(ranks)))

    def name(self, number: int) -> str:
        return f"rank {number} of {self.nodes[number].partition('@')[0]}"

    def names(self, ranks: Iterable[int]) -> str:
        numbers = sorted(ranks)
        said = ", ".join(self.name(number) for number in numbers[:4])
        return f"{said} and {len(numbers) - 4} more" if len(numbers) > 4 else said

    def verdict(
        self,
        fault: Fault,
        ranks: Iterable[int],
        detail: str,
        *,
        confidence: float,
        act: bool = True,
        named: bool = True,
    ) -> Verdict:
        """Return a verdict on `ranks`; named: whether their nodes are at fault."""
        numbers = tuple(sorted(ranks))
        names = {number: node.partition("@")[0] for number, node in self.nodes.items()}
        return Verdict(
            kind=VerdictKind.STUCK,
            fault=str(fault),
            key=self.generation.key,
            step=max(rank.step for rank in self.ranks.values()),
            detail=detail,
            culprits=self.nodes_of(numbers) if named else (),
            ranks=numbers,
            program=fault.of_program,
            act=act,
            confidence=confidence,
            waits=self.graph.lines(LINES, names),
            silent=tuple(self.ranks[number].silent / 1000 for number in sorted(self.ranks)),
        )


# Ranks that wait for nobody.


def _stands(case: _Case, sinks: list[int]) -> Verdict | None:
    certain = [n for n in sinks if case.ranks[n].state in (RankState.STOPPED, RankState.HELD) and case.due(n)]
    for state, fault in ((RankState.STOPPED, Fault.STOPPED), (RankState.HELD, Fault.HELD)):
        named = [number for number in certain if case.ranks[number].state is state]
        if named:
            return _named(case, fault, named, confidence=1.0)
    if not all(case.due(number) for number in sinks):
        return None
    phases = {_phase(case.ranks[number]) for number in sinks}
    everybody = len(sinks) == len(case.ranks)
    for phase in sorted(phases):
        alike = [number for number in sinks if _phase(case.ranks[number]) is phase]
        if len(case.nodes_of(alike)) > max(MANY, MANY_SHARE * len(case.generation.nodes)) or (
            everybody and len(phases) == 1 and phase in _OUTSIDE and (len(sinks) > 1 or phase is Phase.USER)
        ):
            detail = f"{len(alike)} of {len(case.ranks)} ranks stand at {_at(phase)}: {_what_all_use(phase)}"
            detail += _sources([case.ranks[number] for number in alike])
            return case.verdict(Fault.STALLED, alike, detail, confidence=0.5, act=False, named=False)
    blocked = [number for number in sinks if case.ranks[number].state is RankState.BLOCKED]
    if blocked:
        return _named(case, Fault.BLOCKED, blocked, confidence=0.95)
    left = [number for number in sinks if _phase(case.ranks[number]) is Phase.LEAVE]
    if left and any(_phase(rank) is not Phase.LEAVE for rank in case.ranks.values()):
        return _named(case, Fault.LEFT, left, confidence=0.9)
    if left:
        # All steps are made: whatever one of them does last, the others can wait for.
        return _named(case, Fault.USER, left, confidence=0.5, act=False)
    # An idle one may wait for a busy one by means that nobody records; not the other way round.
    busy = [number for number in sinks if _busy(case.ranks[number])]
    if busy:
        phases = {_phase(case.ranks[number]) for number in busy}
        fault = {Phase.USER: Fault.USER, Phase.DATA: Fault.LOADER}.get(min(phases), Fault.SPINNING)
        if len(phases) > 1:
            fault = Fault.SPINNING
        long = all(case.ranks[number].silent >= PATIENT * case.ranks[number].allowed_busy for number in busy)
        act = long or (fault is not Fault.USER and len(busy) < len(case.ranks))
        return _named(case, fault, busy, confidence=0.9 if act else 0.7, act=act)
    faults = {_BY_PHASE.get(_phase(case.ranks[number]), Fault.IDLE) for number in sinks}
    return _named(case, min(faults) if len(faults) == 1 else Fault.IDLE, sinks, confidence=0.9)


def _named(case: _Case, fault: Fault, ranks: list[int], *, confidence: float, act: bool = True) -> Verdict:
    first = case.ranks[ranks[0]]
    others = sum(1 for number in case.graph.waits if number not in ranks)
    what = {
        Fault.STOPPED: "stopped (state T)",
        Fault.HELD: "not running Python: something holds its interpreter",
        Fault.BLOCKED: f"blocked in the kernel{f' in {first.wchan}' if first.wchan else ''}",
        Fault.LOADER: "waiting for its data loader"
        + ("" if first.loader_moves else ", whose processes do nothing")
        + _sources([case.ranks[number] for number in ranks]),
        Fault.SPINNING: "computing without progress",
        Fault.LEFT: "at its end while others train",
        Fault.COPY: "waiting for the copy of its snapshot",
        Fault.USER: f"{'computing' if _busy(first) else 'idle'} in the script's own code",
    }.get(fault, "idle")
    verb = "is" if len(ranks) == 1 else "are"
    silent = first.silent / 1000
    where = f"at {_at(_phase(first))} {after_step(first.step)}"
    detail = f"{case.names(ranks)} {verb} {what}, {where}, for {silent:.1f} s"
    if first.top_frame:
        detail += f", in {first.top_frame}"
    if others:
        detail += f"; {others} other{'s wait' if others > 1 else ' waits'}"
    # Where all nodes are at fault, none is.
    named = len(case.nodes_of(ranks)) < len(case.generation.nodes) or len(case.generation.nodes) == 1
    return case.verdict(fault, ranks, detail, confidence=confidence, act=act, named=named)


def _sources(ranks: list[RankStall]) -> str:
    """Return in words what the data loaders of some ranks wait for, most of them first; "" where none says."""
    named = Counter(rank.source for rank in ranks if rank.source).most_common()
    if not named:
        return ""
    who = "it waits" if len(ranks) == 1 else "they wait"
    return f" ({who} for {', '.join(name for name, _ in named[:2])}{', ...' if len(named) > 2 else ''})"


def _phase(rank: RankStall) -> Phase:
    return Phase[rank.phase.upper()]


def _at(phase: Phase) -> str:
    return phase.name.lower()


def _busy(rank: RankStall) -> bool:
    if rank.state is RankState.HELD:
        return rank.cpu >= BUSY
    return rank.state is RankState.BUSY or (rank.loader_moves and _phase(rank) is Phase.DATA)


def _what_all_use(phase: Phase) -> str:
    return {
        Phase.DATA: "look at where the data is read from",
        Phase.COPY: "look at the memory and the network that snapshots are copied over",
        Phase.RESTORE: "look at the store",
        Phase.USER: "long work between steps belongs into `with run.pause(...)`",
    }.get(phase, "look at what they all use")


# Every rank waits.


def _waits(case: _Case) -> Verdict | None:
    odd = _odd(case)
    if odd is not None:
        return odd if all(case.due(number, idle=True) for number in odd.ranks) else None
    unexplained = case.graph.unexplained()
    if unexplained:
        return _does_not_end(case, unexplained)
    ring = case.graph.cycle()
    if not ring or not all(case.due(number, idle=True) for number in ring):
        return None
    few = _minority(case)
    if few:
        at = ", ".join(f"{case.name(number)} in {case.graph.waits[number]}" for number in few[:4])
        detail = f"{case.names(few)} left the program that the others of its place follow: {at}"
        return case.verdict(Fault.LEFT, few, detail, confidence=0.8)
    pairs = "; ".join(f"{case.name(number)} waits in {case.graph.waits[number]}" for number in ring[:8])
    detail = f"{len(ring)} ranks wait for each other, and none of them can be singled out: {pairs}"
    return case.verdict(Fault.DEADLOCK, ring, detail, confidence=0.7, named=False)


def _odd(case: _Case) -> Verdict | None:
    """Return a verdict on the few whose present step is no beginning of their last one."""
    odd = [number for number, rank in case.ranks.items() if rank.odd]
    if not odd or 2 * len(odd) > len(case.ranks):
        # Where most do something else than in their last step, that is what the script does now.
        return None
    graph = case.graph
    fits = True
    for number in odd:
        operation = graph.waits.get(number)
        if operation is not None and not operation.between_two:
            fits &= len(set(_fingerprints(case, operation).values())) < 2
    fault = Fault.LEFT if fits else Fault.MISMATCH
    what = "left the program of its last step"
    if not fits:
        what = "called a collective with other sizes or another type than the others"
    detail = f"{case.names(odd)} {what}: {case.ranks[odd[0]].odd}"
    return case.verdict(fault, odd, detail, confidence=0.95)


def _does_not_end(case: _Case, ranks: tuple[int, ...]) -> Verdict | None:
    """Return a verdict on an operation that all its members have posted."""
    if not all(case.due(number) for number in ranks):
        return None
    operations = dict.fromkeys(case.graph.waits[number] for number in ranks)
    own = [number for number in ranks if case.graph.waits[number].axis is Axis.USER]
    if len({case.ranks[number].top_frame for number in own} - {""}) > 1:
        return _apart(case, own)
    unlike = _unlike(case, ranks)
    if unlike is not None:
        return unlike
    ends = [_unfinished(case, operation) for operation in operations]
    shared = set.intersection(*({case.nodes[number] for number in end} for end in ends))
    if len(ends) > 1 and len(shared) == 1:
        (node,) = shared
        named = [number for end in ends for number in end if case.nodes[number] == node]
        detail = f"nothing arrives at or from {node.partition('@')[0]}: {_operations(operations)} do not end"
        return case.verdict(Fault.LINK, set(named), detail, confidence=0.8)
    together = {number for end in ends for number in end}
    if own:
        return _apart(case, own)
    detail = f"nothing arrives between {case.names(together)}: {_operations(operations)}, which all have begun"
    if len(together) == 1:
        (number,) = together
        detail = f"not all arrives at {case.name(number)}: {_operations(operations)} does not end for it alone"
    one = len(case.nodes_of(together)) == 1
    return case.verdict(Fault.LINK, together, detail, confidence=0.6, named=one)


def _unlike(case: _Case, ranks: Iterable[int]) -> Verdict | None:
    """Return a verdict on operations in which some of `ranks` wait, and of which records show other sizes or types."""
    for operation in dict.fromkeys(case.graph.waits[number] for number in ranks):
        prints = _fingerprints(case, operation)
        common = Counter(prints.values()).most_common()
        if operation.between_two or len(common) < 2:
            continue
        most, count = common[0]
        few = [number for number, value in prints.items() if value != most]
        if 2 * count > len(prints):
            detail = f"{case.names(few)} called {operation} with other sizes or another type than the others did"
            return case.verdict(Fault.MISMATCH, few, detail, confidence=0.9)
        if len(prints) == 2:
            detail = f"{case.names(prints)} called {operation} with sizes or types that do not fit together"
            return case.verdict(Fault.MISMATCH, prints, detail, confidence=0.7, named=False)
    return None


def _apart(case: _Case, ranks: list[int]) -> Verdict:
    """Return a verdict on ranks that all wait in collectives of the script's own, of which only stacks tell.

    Which of its groups they are of is not known, nor how many each rank has begun. Called at different places they are
    taken for different ones, which wait for each other (a script with one line for the root of a collective and another
    for the rest is so too, where the network loses it: neither names anybody). Called at one place they may be of
    different groups as well: from outside both look alike, and the network is what can be cured.
    """
    at = {number: case.ranks[number].top_frame or "an unknown place" for number in ranks}
    places = "; ".join(f"{case.name(number)} in {at[number]}" for number in ranks[:8])
    if len(set(at.values())) > 1:
        detail = f"{len(ranks)} ranks wait in different collectives of the script's own, each for the others: {places}"
        return case.verdict(Fault.DEADLOCK, ranks, detail, confidence=0.7, named=False)
    detail = (
        f"collectives of the script's own do not end, which {case.names(ranks)} have begun at {at[ranks[0]]}: nothing "
        "arrives between them, or process groups of the script's own wait for each other"
    )
    return case.verdict(Fault.LINK, ranks, detail, confidence=0.5, named=len(case.nodes_of(ranks)) == 1)


def _operations(operations: Iterable[Operation]) -> str:
    """Return their names, each once: the groups of an axis have names in common, and there may be thousands of them."""
    names = list(dict.fromkeys(map(str, operations)))
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{', '.join(names[:8])}{more}"


def _fingerprints(case: _Case, operation: Operation) -> dict[int, int]:
    """Return the fingerprints of those whose newest operation on this axis it is."""
    prints = {}
    for number in operation.members:
        rank = case.ranks[number]
        value = newest_fingerprint(rank, operation.axis)
        if posted(rank, operation.axis) == operation.number and value:
            prints[number] = value
    return prints


def _unfinished(case: _Case, operation: Operation) -> tuple[int, ...]:
    if operation.between_two:
        return operation.members
    waiting = [n for n in operation.members if done(case.ranks[n], operation.axis) < operation.number]
    # One of many that alone has not all of it is an end for certain; with two members the other is as likely.
    return tuple(waiting) if len(waiting) > 1 or len(operation.members) > 2 else operation.members


def _minority(case: _Case) -> list[int]:
    """Return the ranks that wait elsewhere than most of those of their stage, where three or more do the same work."""
    layout = case.generation.layout
    assert layout is not None
    places: dict[tuple[int, int, int], list[int]] = {}
    for number in case.ranks:
        place = place_of(number, layout)
        places.setdefault((place.pp, place.cp, place.tp), []).append(number)
    few = []
    for peers in places.values():
        at = {number: (case.graph.waits[number].axis, case.graph.waits[number].number) for number in peers}
        most, count = Counter(at.values()).most_common(1)[0]
        if len(peers) > 2 and 2 * count > len(peers):
            few += [number for number in peers if at[number] != most]
    return sorted(few)
