"""A second witness before a refused connection counts as a death: whom to ask, what they answer, and what follows.

A refused connection is what one host saw. A firewall on the way that answers for a living node looks the same, so that
nobody is declared dead on one node's word. A node whose dial is refused asks its other neighbours on the ring to try
the same node at once, over the heartbeat connections that stand:

- one of them is refused as well, or finds another identity there: that is a death;
- some answer, and all of those have reached it: it lives. The asker dials again, and reports no death;
- nobody can say: no death either. The asker dials and asks again in a moment; meanwhile the node falls silent, as if
  its cable were pulled, and lease and doubt decide. If one word were enough for want of a second, a node could put out
  others while those it should have asked are only stopped, or slow.

Of two nodes neither has anybody to ask: there one refusal is a death, or each death would cost a lease, unless beats
come over the connection that the other has dialled itself. The same holds for a node that has no connection left and is
refused by all its neighbours: as a rule they died together, and there is no other evidence.

A node that is asked tries only its own neighbours, at the addresses in their sealed records: nothing in a question says
where to connect. It makes one try of each at a time, and the result also answers those who ask within `FRESH`.
"Reached" takes a proof of the identity that is meant, since the system accepts connections for processes that are about
to end.

Everything here is pure: times are passed in, and connections are keys that `links` can send to.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Generic, TypeVar

ASKED = 0.5
"""Seconds to wait for answers. They take milliseconds, or at most the beat of a node that has noticed nothing yet."""

TRIED = 0.25
"""Seconds for a try that nobody answers, less than the asker waits."""

FRESH = 0.05
"""Seconds for which the result of a try is the answer to others who ask."""

MOST_WAITING = 8
"""Most askers that one try answers: a node has four neighbours."""

K = TypeVar("K", bound=Hashable)


class TryResult(IntEnum):
    """The result of a neighbour's try. It goes over the wire as its number."""

    UNKNOWN = 0
    REACHED = 1
    REFUSED = 2


class Conclusion(StrEnum):
    """What a refusal means, given the answers of the others."""

    OPEN = "open"
    DEAD = "dead"
    LIVES = "lives"
    UNWITNESSED = "unwitnessed"


def conclude(verdicts: Collection[TryResult | None], *, over: bool) -> Conclusion:
    """Return what follows from these answers, None for those still missing. over: the time to wait for them is over."""
    if TryResult.REFUSED in verdicts:
        return Conclusion.DEAD
    if None in verdicts and not over:
        return Conclusion.OPEN
    return Conclusion.LIVES if TryResult.REACHED in verdicts else Conclusion.UNWITNESSED


@dataclass(slots=True)
class _Inquiry(Generic[K]):
    number: int
    evidence: str
    until: float
    verdicts: dict[K, TryResult | None]


class Inquiries(Generic[K]):
    """The questions that this node has asked, one about each id at a time."""

    def __init__(self) -> None:
        self._open: dict[str, _Inquiry[K]] = {}
        self._count = 0

    def __contains__(self, id: str) -> bool:
        return id in self._open

    @property
    def due(self) -> float | None:
        """When the first of them is over at the latest, None for none."""
        return min((one.until for one in self._open.values()), default=None)

    def begin(self, id: str, evidence: str, asked: Iterable[K], now: float) -> int:
        """Return the number of a new question, which goes to all of `asked`."""
        self._count += 1
        self._open[id] = _Inquiry(self._count, evidence, now + ASKED, dict.fromkeys(asked))
        return self._count

    def answered(self, by: K, number: int, verdict: TryResult) -> None:
        """Take in an answer. One to another question, or from a node that was not asked, counts for nothing."""
        for one in self._open.values():
            if one.number == number and by in one.verdicts:
                one.verdicts[by] = verdict

    def lost(self, by: K) -> None:
        """Take note that no answer will come over this connection."""
        for one in self._open.values():
            if by in one.verdicts and one.verdicts[by] is None:
                one.verdicts[by] = TryResult.UNKNOWN

    def forget(self, id: str) -> None:
        """Ask about this id no more."""
        self._open.pop(id, None)

    def concluded(self, now: float) -> list[tuple[str, str, Conclusion, K | None]]:
        """End those that are over: the id, this node's evidence, the conclusion, and the second witness, if any."""
        ended: list[tuple[str, str, Conclusion, K | None]] = []
        for id, one in list(self._open.items()):
            conclusion = conclude(one.verdicts.values(), over=now >= one.until)
            if conclusion is not Conclusion.OPEN:
                del self._open[id]
                witness = next((by for by, verdict in one.verdicts.items() if verdict is TryResult.REFUSED), None)
                ended.append((id, one.evidence, conclusion, witness))
        return ended


@dataclass(slots=True)
class _Try(Generic[K]):
    until: float
    waiting: dict[K, int] = field(default_factory=dict)


class Tries(Generic[K]):
    """What others want to know of this node's neighbours: the tries under way, and the results of the last ones."""

    def __init__(self) -> None:
        self._open: dict[str, _Try[K]] = {}
        self._verdicts: dict[str, tuple[TryResult, float]] = {}

    @property
    def due(self) -> float | None:
        """When the first of them is over at the latest, None for none."""
        return min((one.until for one in self._open.values()), default=None)

    def asked(self, id: str, by: K, number: int, now: float) -> tuple[TryResult | None, bool]:
        """Return the answer, None if a try has to show it, and whether that try is to begin now."""
        verdict, at = self._verdicts.get(id, (TryResult.UNKNOWN, -FRESH))
        if now - at < FRESH:
            return verdict, False
        begins = id not in self._open
        one = self._open.setdefault(id, _Try(now + TRIED))
        if by not in one.waiting and len(one.waiting) >= MOST_WAITING:
            return TryResult.UNKNOWN, False
        one.waiting[by] = number
        return None, begins

    def conclude(self, id: str, verdict: TryResult, now: float) -> list[tuple[K, int]]:
        """End a try; return who asked for it, each with the number of its question."""
        one = self._open.pop(id, None)
        self._verdicts = {each: kept for each, kept in self._verdicts.items() if now - kept[1] < FRESH}
        self._verdicts[id] = verdict, now
        return [] if one is None else list(one.waiting.items())

    def lost(self, by: K) -> None:
        """Take note that this connection ended."""
        for one in self._open.values():
            one.waiting.pop(by, None)

    def overdue(self, now: float) -> list[str]:
        """Return whose tries have taken too long."""
        return [id for id, one in self._open.items() if now >= one.until]
