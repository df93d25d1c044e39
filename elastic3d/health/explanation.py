"""What a verdict means for a person: what happened, who and why not others, what was done, and what to do now. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic3d.health.stuck import Fault
from elastic3d.membership.stalls import RankStall, Verdict, VerdictKind, after_step
from elastic3d.planner.remedy import RungKind

SHOWN = 12
"""Lines of each list on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """A generation that was sealed."""

    number: int
    """Its number."""
    active: int
    """How many nodes trained in it."""
    left: tuple[str, ...] = ()
    """Names of nodes that the one before had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """A rank as it was when its generation stood still."""

    rank: int
    """Its number."""
    node: str
    """The name of its node."""
    phase: str
    """What it was at, such as "forward" or "data"."""
    state: str
    """How its processes were: idle, busy, stopped, blocked, held or dead."""
    silent: float
    """Seconds since its last sign of progress."""
    waits: str = ""
    """The operation that it waited for, "" for none."""
    odd: str = ""
    """How its step differed from its last one, "" if it did not."""
    at: str = ""
    """The code that its main thread was in, "" if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a generation stood still, or what was wrong; with a `schema`, what `elastic3d explain --json` prints."""

    generation: int
    """Its number."""
    attempt: int
    """Which attempt at it."""
    step: int
    """The newest step any of its ranks had made."""
    fault: str
    """The class of the fault, such as "stopped"."""
    detail: str
    """What happened, in one sentence."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes at fault; none where nobody can be singled out."""
    ranks: tuple[int, ...] = ()
    """Their ranks, or those between which nothing arrives."""
    of_program: bool = False
    """Whether the script is at fault rather than a node."""
    confidence: float = 1.0
    """From 0 to 1."""
    reasons: tuple[str, ...] = ()
    """Why it is they, and not others."""
    done: str = ""
    """What was done."""
    todo: tuple[str, ...] = ()
    """What to do now."""
    waits: tuple[str, ...] = ()
    """Who waited for whom."""
    silent: tuple[SilentRank, ...] = ()
    """What all ranks were at, where an evidence bundle says so."""
    evidence: tuple[str, ...] = ()
    """Folders of evidence."""
    kind: str = "stuck"
    """What kind of trouble it was: "stuck", "slow", "memory", "numbers", "lying", "exam" (of newcomers) or "state" (at
    rest)."""
    rungs: tuple[str, ...] = ()
    """What could be done about slow nodes, and what each would gain and cost."""


def explain(
    verdict: Verdict,
    *,
    formed: Sequence[Formed] = (),
    ended: str = "",
    stalls: Mapping[str, Sequence[RankStall]] | None = None,
    evidence: Sequence[str] = (),
) -> Explanation:
    """Return what a verdict means.

    formed: the job's generations, oldest first. ended: why the job ended, "" if it did not. stalls: by node's id, where
    they are at hand. evidence: folders of it.
    """
    number, _, attempt = verdict.key.partition(".")
    silent = tuple(_silent(node, rank) for node, ranks in sorted((stalls or {}).items()) for rank in ranks)
    silent = tuple(sorted(silent, key=lambda one: one.rank))
    return Explanation(
        generation=int(number),
        attempt=int(attempt or 0),
        step=verdict.step,
        fault=verdict.fault,
        detail=verdict.detail,
        nodes=tuple(id.partition("@")[0] for id in verdict.culprits),
        ranks=verdict.ranks,
        of_program=verdict.program,
        confidence=verdict.confidence,
        reasons=_reasons(verdict, silent),
        done=_done(verdict, int(number), formed, ended),
        todo=_todo(verdict),
        waits=verdict.waits,
        silent=silent,
        evidence=tuple(evidence),
        kind=str(verdict.kind),
        rungs=verdict.rungs,
    )


def page(explanation: Explanation) -> str:
    """Return the explanation as text for a terminal, one page."""
    e = explanation
    if e.kind == VerdictKind.SLOW:
        return _slow_page(e)
    if e.kind == VerdictKind.MEMORY:
        return _memory_page(e)
    lines = [f"Generation {e.generation} stood still {after_step(e.step)}: {e.fault}", "", f"  {e.detail}"]
    who = f"node {', '.join(e.nodes)}" if e.nodes else "nobody can be singled out"
    ranks = f" (rank{'s' * (len(e.ranks) > 1)} {', '.join(map(str, e.ranks[:SHOWN]))})" if e.ranks else ""
    # Code between steps may do nothing wrong, as where a file system hangs; but it is where somebody has to look.
    what = "the script's own code" if e.of_program or e.fault == Fault.USER else "not the script's code"
    lines += ["", f"Who        {who}{ranks}; {what}; confidence {e.confidence:.0%}"]
    for title, texts in (("Why", e.reasons), ("Done", (e.done,)), ("Do now", e.todo), ("Evidence", e.evidence)):
        shown = [text for text in texts if text]
        lines += [f"{title if not at else '':10s} {text}" for at, text in enumerate(cut(shown))]
    if e.silent:
        lines += ["", "Ranks as they were:"]
        lines += [f"  {text}" for text in cut([_row(rank) for rank in _first(e)])]
    if e.waits:
        lines += ["", "Who waited for whom:"]
        lines += [f"  {text}" for text in cut(list(e.waits))]
    return "\n".join(lines)


def _slow_page(e: Explanation) -> str:
    """Return what was done about slow nodes, or about those that are well again."""
    lines = [f"Generation {e.generation} was not the fastest after step {e.step}: {e.fault}", "", f"  {e.detail}", ""]
    ranks = f" (rank{'s' * (len(e.ranks) > 1)} {', '.join(map(str, e.ranks[:SHOWN]))})" if e.ranks else ""
    who = f"node {', '.join(e.nodes)}{ranks}" if e.nodes else "no node is slow any more"
    lines.append(f"Who        {who}")
    lines.append(f"Done       {e.done}")
    lines += [f"{'Do now' if not at else '':10s} {text}" for at, text in enumerate(e.todo)]
    if e.rungs:
        lines += ["", "What could be done:"]
        lines += [f"  {text}" for text in cut(list(e.rungs))]
    return "\n".join(lines)


def _memory_page(e: Explanation) -> str:
    """Return where memory ran out, and how the next generation needs less."""
    ranks = f" (rank{'s' * (len(e.ranks) > 1)} {', '.join(map(str, e.ranks[:SHOWN]))})" if e.ranks else ""
    after = f"after step {e.step}" if e.step > 0 else "before its first step"
    lines = [f"Generation {e.generation} ran out of memory {after}: {e.fault}", "", f"  {e.detail}", ""]
    lines.append(f"Who        node {', '.join(e.nodes)}{ranks}: what a rank needs follows from its place in the mesh")
    lines.append(f"Done       {e.done}")
    lines += [f"{'Do now' if not at else '':10s} {text}" for at, text in enumerate(e.todo)]
    return "\n".join(lines)


def cut(texts: list[str]) -> list[str]:
    """Return the first lines of a list, and how many more there are."""
    return [*texts[:SHOWN], f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else texts


def _first(e: Explanation) -> list[SilentRank]:
    """Return the ranks, those at fault first."""
    return sorted(e.silent, key=lambda one: (one.rank not in e.ranks, one.rank))


def _row(rank: SilentRank) -> str:
    row = f"rank {rank.rank} of {rank.node}: {rank.state} for {rank.silent:.1f} s at {rank.phase}"
    row += f", waits in {rank.waits}" if rank.waits else ", waits for no rank"
    return row + (f", in {rank.at}" if rank.at else "")


def _silent(node: str, rank: RankStall) -> SilentRank:
    return SilentRank(
        rank=rank.rank,
        node=node.partition("@")[0],
        phase=rank.phase.lower(),
        state=str(rank.state),
        silent=rank.silent / 1000,
        waits=f"{rank.wait.axis.lower()} {rank.wait.number}" if rank.wait is not None else "",
        odd=rank.odd,
        at=rank.top_frame,
    )


def _reasons(verdict: Verdict, silent: Sequence[SilentRank]) -> tuple[str, ...]:
    if verdict.kind is not VerdictKind.STUCK:
        return ()
    reasons = []
    if verdict.fault == Fault.STALLED:
        reasons.append("too many stand at the same for one of them to be the reason: what they all use is")
    elif verdict.fault == Fault.LINK:
        reasons.append("all its members have begun this operation and none is behind, yet it does not end")
    elif verdict.fault == Fault.DEADLOCK:
        reasons.append("every rank waits for another, and each does what it did in its last step")
    elif verdict.fault == Fault.LEFT and {rank.phase for rank in silent if rank.rank in verdict.ranks} == {"leave"}:
        reasons.append("it is at its end, where it waits for no other rank, and others have steps to make with it")
    elif verdict.program:
        reasons.append("its step is no beginning of the step it made before, or not what most of its place do")
    else:
        reasons.append("it waits for no other rank, and it was silent for longer than this phase may take")
    if silent and verdict.ranks:
        others = [rank for rank in silent if rank.rank not in verdict.ranks]
        waiting = sum(1 for rank in others if rank.waits)
        if others:
            reasons.append(f"{waiting} of the {len(others)} other ranks waited for one that is behind")
        reasons += [f"rank {rank.rank}: {rank.odd}" for rank in silent if rank.rank in verdict.ranks and rank.odd]
    return tuple(reasons)


def _done(verdict: Verdict, number: int, formed: Sequence[Formed], ended: str) -> str:
    if not verdict.act and verdict.kind is VerdictKind.MEMORY:
        return f"the same layout was tried again{f', and the job ended: {ended}' if ended else ''}"
    if not verdict.act:
        return "nothing: it was only reported, because a new generation would not help, or health= says so"
    after = next((one for one in formed if one.number > number), None)
    if verdict.kind is VerdictKind.SLOW:
        number = after.number if after is not None else number + 1
        return f"all trainers left at a boundary between two steps for generation {number}, and no step was made again"
    if verdict.kind is VerdictKind.MEMORY:
        number = after.number if after is not None else number + 1
        return f"generation {number} was formed to need less, with the same bits; it stays so for the rest of the job"
    if after is None:
        return f"the job ended: {ended}" if ended else "no generation was formed after it yet"
    gone = [id.partition("@")[0] for id in verdict.culprits if id.partition("@")[0] in after.left]
    text = f"all trainers were killed, and generation {after.number} was formed with {after.active} nodes"
    return f"{text}, without {', '.join(gone)}" if gone else text


_TODO = {
    Fault.STOPPED: "look for who sends SIGSTOP on that node, or for a debugger that holds the process",
    Fault.HELD: "stacks.txt shows the native call that keeps the interpreter's lock: it must release it, or end sooner",
    Fault.BLOCKED: "look at that node's disks, network file systems and drivers (dmesg): a process in state D cannot "
    "be killed before the kernel lets it go",
    Fault.LOADER: "look at what the data set reads from, and at its workers in proc.txt; give reads a time limit",
    Fault.USER: 'put long work between steps, such as an evaluation, into `with run.pause("eval", "10m")`; otherwise '
    "stacks.txt shows what the script waits for",
    Fault.COPY: "look at that node's memory and keeper: a snapshot was not copied within the time it may take",
    Fault.START: "stacks.txt shows what building the model waits for",
    Fault.RESTORE: "look at the store and at the network of that node: its state did not arrive",
    Fault.IDLE: "stacks.txt shows the lock, the socket or the file that it waits for",
    Fault.SPINNING: "stacks.txt shows the loop; if one step may take that long, raise Health(stuck=...)",
    Fault.LEFT: "let all ranks call the same collectives in the same order: look for branches on the rank, on the data "
    "or on the time",
    Fault.MISMATCH: "let all ranks call this collective with the same sizes and types: look for sizes that depend on "
    "the rank's data",
    Fault.LINK: "look at the network between these nodes: a firewall, a switch, a cable; try `elastic3d doctor`",
    Fault.DEADLOCK: "compare the two ends of each line below: they call the same collectives in different orders",
    Fault.STALLED: "look at what all ranks use: the store, the file system, the network",
}


def _todo(verdict: Verdict) -> tuple[str, ...]:
    if verdict.kind is VerdictKind.SLOW:
        return _todo_slow(verdict)
    if verdict.kind is VerdictKind.MEMORY:
        return _todo_memory(verdict)
    fault = next((fault for fault in Fault if fault == verdict.fault), None)
    todo = [_TODO[fault]] if fault is not None else []
    if verdict.culprits and not verdict.program:
        names = ", ".join(id.partition("@")[0] for id in verdict.culprits[:4])
        todo.append(f"if it happens there again the node is set aside; `elastic3d quarantine {names}` does so now")
    return tuple(todo)


def _todo_memory(verdict: Verdict) -> tuple[str, ...]:
    names = ", ".join(id.partition("@")[0] for id in verdict.culprits[:4])
    done = ["steps take longer so; with more nodes, or a smaller micro_batch in a new run, they need not"]
    return (
        f"look at what else holds memory on {names}: memory.exhausted in the events names it",
        *(done if verdict.act else ["leave layout= and the ZeRO stage open, or take a smaller micro_batch"]),
    )


def _todo_slow(verdict: Verdict) -> tuple[str, ...]:
    names = ", ".join(id.partition("@")[0] for id in verdict.culprits[:4])
    todo = (
        [f"look at {names}: clocks, cooling, other processes, its links; once well, it counts again"] if names else []
    )
    if verdict.fault == RungKind.EVICT:
        todo.append(f"`elastic3d quarantine {names}` lets the others go on without it")
    return tuple(todo)
