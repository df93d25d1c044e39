"""Who computed wrongly, when two ranks differ over one micro-batch: pure.

A difference alone names nobody. So the same step computes the micro-batch again, before any update: both columns repeat
it, and a third one replays it. Every one of these is a statement: a rank, its node, and the digest it came to. A rank
is convicted only if two others, on two other nodes, agree with each other and differ from it; they are the same bits or
they are not, so no threshold is involved, and nobody is convicted by one witness or by two of one node.

| what the repetitions say | outcome |
|---|---|
| all agree now | whoever differed at first did so once: transient |
| two independent ranks agree, one differs again | it computes wrongly: persistent |
| all agree that the result is not finite | the data or the model, not a device |
| no two independent ranks agree, or honest devices part by their kind | a known product decides; or not deterministic |

With dp 2 there is no third column. Each may then contradict itself, which shows a transient fault. Of two ranks that
both stand by what they said, each makes a product whose result has been known since the release, the same on every
healthy device: its result is the second witness. Who errs in it each time is convicted, if another one that differs
from it, on another node, does not; an honest device never is, whatever the other one says. Where both stand the test
too the case stays undecided. A third node could decide it, but it would need the model, in memory that a spare mostly
does not have. Setting both aside in turn would decide nothing without a third node either: one alone repeats only its
own mistakes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What one rank's pass over the micro-batch came to. repeated: it was made in the hearing, not before it.

    node, device: where it was computed, and the name of that device. digest: of the outcome; finite: whether all its
    numbers are.
    """

    rank: int
    node: str
    device: str
    digest: int
    finite: bool = True
    repeated: bool = False


class Finding(StrEnum):
    """What a hearing found."""

    TRANSIENT = "transient"  # the accused agrees now: what it said at first was an accident
    PERSISTENT = "persistent"  # the accused differs again
    NOT_FINITE = "not_finite"  # all agree, on numbers that are not finite
    NONDETERMINISTIC = "nondeterministic"  # honest ranks cannot agree: equal inputs do not give equal bits here
    UNDECIDED = "undecided"  # too few witnesses that are independent of each other
    AGREED = "agreed"  # nobody ever differed


class Compared(StrEnum):
    """Of what ranks came to other bits."""

    PASSES = "passes"  # a micro-batch that several ran
    TRANSIT = "transit"  # a piece of a gradient, where it leaves and where it arrives
    WEIGHTS = "weights"  # gathered weights, and those of their owner
    SUM = "sum"  # a sum of gradients that another rank added up again
    UPDATE = "update"  # a piece of an update that another rank computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Hearing:
    """culprits: ranks that computed wrongly, none unless the outcome is transient or persistent. detail: for people.

    parts: the seconds in which each rank computed again, by rank; () where nobody measured them.
    """

    finding: Finding
    culprits: tuple[int, ...] = ()
    detail: str = ""
    parts: tuple[float, ...] = ()


def hear(statements: Collection[Statement]) -> Hearing:
    """Return what follows from all statements over one result. The order in which they are given is no matter."""
    given = sorted(statements, key=lambda one: (one.rank, one.repeated))
    if len({one.digest for one in given}) <= 1:
        if given and not given[0].finite:
            return Hearing(finding=Finding.NOT_FINITE, detail="every rank comes to the same numbers, not all finite")
        return Hearing(finding=Finding.AGREED)
    last = {one.rank: one for one in given if one.repeated}
    agreeing = _independent(list(last.values()))
    if len(agreeing) > 1:
        parts = "; ".join(f"ranks {_names(group)} agree" for group in agreeing)
        return Hearing(
            finding=Finding.NONDETERMINISTIC,
            detail=f"{parts}, but not with each other: equal inputs do not give equal bits on these devices",
        )
    if not agreeing:
        return _without_witnesses(given, last)
    (truth,) = agreeing
    digest = truth[0].digest
    wrong = sorted({one.rank for one in given if one.digest != digest})
    again = sorted(rank for rank in wrong if rank in last and last[rank].digest != digest)
    kinds = {one.device for one in truth}
    strange = [rank for rank in again if last[rank].device not in kinds]
    if strange:
        return Hearing(
            finding=Finding.NONDETERMINISTIC,
            detail=f"rank {strange[0]} computes on a {last[strange[0]].device}, and those that agree with each other "
            f"on {', '.join(sorted(kinds))}: devices of unlike kinds need not come to equal bits",
        )
    witnesses = _names(truth)
    if again:
        others = sorted(set(wrong) - set(again))
        more = f"; {_ranks(others)} differed once" if others else ""
        return Hearing(
            finding=Finding.PERSISTENT,
            culprits=tuple(again),
            detail=f"ranks {witnesses}, on different nodes, agree, and {_ranks(again)} differed again{more}",
        )
    return Hearing(
        finding=Finding.TRANSIENT,
        culprits=tuple(wrong),
        detail=f"ranks {witnesses}, on different nodes, agree, and {_ranks(wrong)} differed once and agrees now",
    )


def decided(hearing: Hearing, statements: Collection[Statement], failed: Collection[int]) -> Hearing:
    """Return what follows where a hearing was undecided and those that differ were put to a test with a known answer.

    failed: the ranks that failed it each time.
    """
    last = {one.rank: one for one in statements if one.repeated}
    first = {one.rank: one for one in statements if not one.repeated}
    passed = [last[rank] for rank in first if rank in last and rank not in failed]
    culprits = tuple(
        sorted(
            rank
            for rank in first
            if rank in failed
            and rank in last
            and any(one.node != last[rank].node and one.digest != last[rank].digest for one in passed)
        )
    )
    if not culprits:
        how = "fail" if failed else "stand"
        detail = f"{hearing.detail}; {_ranks(sorted(first))} {how} the test of a product whose result is known"
        return Hearing(finding=Finding.UNDECIDED, detail=detail)
    return Hearing(
        finding=Finding.PERSISTENT,
        culprits=culprits,
        detail=f"{hearing.detail}; {_ranks(culprits)} erred each time in a product whose result is known, and "
        f"{_ranks([one.rank for one in passed])} did not",
    )


def _independent(last: Sequence[Statement]) -> list[list[Statement]]:
    """Return the groups of equal statements that come from two nodes at least, largest first."""
    groups: dict[int, list[Statement]] = defaultdict(list)
    for one in last:
        groups[one.digest].append(one)
    able = [group for group in groups.values() if len({one.node for one in group}) > 1]
    return sorted(able, key=lambda group: (-len(group), group[0].rank))


def _without_witnesses(given: Sequence[Statement], last: dict[int, Statement]) -> Hearing:
    """No two nodes agree in the repetitions: look at who contradicts itself."""
    first = {one.rank: one for one in given if not one.repeated}
    unsteady = [rank for rank, one in first.items() if rank in last and last[rank].digest != one.digest]
    if len(unsteady) > 1:
        return Hearing(
            finding=Finding.NONDETERMINISTIC,
            detail=f"{_ranks(unsteady)} came to other bits when they repeated their own passes",
        )
    return Hearing(
        finding=Finding.UNDECIDED,
        detail=f"ranks {_names(list(last.values()))} differ, and no two of them on different nodes agree",
    )


def _names(given: Sequence[Statement]) -> str:
    return ", ".join(str(rank) for rank in sorted({one.rank for one in given}))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
