"""What `links` does for a second witness (`witness`), over its connections: ask others, and try what others ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic3d.membership.actions import RingPeer
from elastic3d.membership.driver.messages import Answer, Ask
from elastic3d.membership.driver.wire import Dial, Guest
from elastic3d.membership.driver.witness import Conclusion, Inquiries, Tries, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of asking about `id`. evidence: of its death, "" for none. lives: others reach it.

    doubt: what people are told where it is no death.
    """

    id: str
    evidence: str = ""
    lives: bool = False
    doubt: str = ""


class Asking:
    """Asks about those that refuse this node."""

    def __init__(self) -> None:
        self._inquiries: Inquiries[Dial | Guest] = Inquiries()

    @property
    def due(self) -> float | None:
        """When to look at the latest, None for never."""
        return self._inquiries.due

    def ask(self, refused: Dial, others: Sequence[Dial | Guest], now: float) -> None:
        """Ask about one that refuses, one connection for each of those asked; once while that is not answered."""
        id = refused.peer.id
        if id not in self._inquiries:
            number = self._inquiries.begin(id, refused.refusal, others, now)
            for end in others:
                if not end.say(Ask(number=number, id=id)):
                    self._inquiries.lost(end)

    def answered(self, end: Dial | Guest, answer: Answer) -> None:
        """Take in an answer."""
        self._inquiries.answered(end, answer.number, answer.verdict)

    def lost(self, end: Dial | Guest) -> None:
        """Take note that a connection ended."""
        self._inquiries.lost(end)

    def forget(self, id: str) -> None:
        """Ask about this one no more."""
        self._inquiries.forget(id)

    def concluded(self, now: float) -> list[Found]:
        """Return what is known by now."""
        return [_told(*one) for one in self._inquiries.concluded(now)]


def _told(id: str, evidence: str, conclusion: Conclusion, witness: Dial | Guest | None) -> Found:
    if witness is not None:
        return Found(id=id, evidence=f"{evidence}, and {id_of(witness).partition('@')[0]} found the same")
    if conclusion is Conclusion.LIVES:
        why = f"{evidence}, but other nodes reach {id} there: is there a firewall between it and this node?"
        return Found(id=id, lives=True, doubt=why)
    return Found(id=id, doubt=f"{evidence}, and no other neighbour could tell: {id} counts as silent until one can")


class Trying:
    """Tries what others ask about this node's own neighbours. dials: the tries under way."""

    def __init__(self) -> None:
        self._near: dict[str, RingPeer] = {}
        self._tries: Tries[Dial | Guest] = Tries()
        self._dials: dict[str, Dial] = {}

    @property
    def dials(self) -> tuple[Dial, ...]:
        """The tries under way."""
        return tuple(self._dials.values())

    @property
    def due(self) -> float | None:
        """When to look at the latest, None for never."""
        return self._tries.due

    def arrange(self, near: Iterable[RingPeer], now: float) -> list[Dial]:
        """Try these from now on, and nobody else; return the tries that are over with that."""
        self._near = {peer.id: peer for peer in near}
        over = [dial for id, dial in self._dials.items() if self._near.get(id) != dial.peer]
        for dial in over:
            self.found(dial, Verdict.UNKNOWN, now)
        return over

    def asked(self, by: Dial | Guest, ask: Ask, now: float, *, neighbour: bool) -> Dial | None:
        """Answer, or take note of who waits; return the try that is to begin. neighbour: whether one asks."""
        peer = self._near.get(ask.id)
        verdict: Verdict | None = Verdict.UNKNOWN
        begins = False
        if neighbour and peer is not None:
            verdict, begins = self._tries.asked(ask.id, by, ask.number, now)
        if verdict is not None:
            by.say(Answer(number=ask.number, verdict=verdict))
        if peer is None or not begins:
            return None
        self._dials[ask.id] = dial = Dial(peer=peer)
        return dial

    def takes(self, dial: Dial) -> bool:
        """Return whether this is one of the tries."""
        return self._dials.get(dial.peer.id) is dial

    def found(self, dial: Dial, verdict: Verdict, now: float) -> None:
        """End a try, and tell those who asked."""
        del self._dials[dial.peer.id]
        for end, number in self._tries.found(dial.peer.id, verdict, now):
            end.say(Answer(number=number, verdict=verdict))

    def lost(self, end: Dial | Guest) -> None:
        """Take note that a connection ended."""
        self._tries.lost(end)

    def overdue(self, now: float) -> list[Dial]:
        """End the tries that take too long, and return them."""
        over = [self._dials[id] for id in self._tries.overdue(now)]
        for dial in over:
            self.found(dial, Verdict.UNKNOWN, now)
        return over


def id_of(end: Dial | Guest) -> str:
    """Return who is at the other end, "" for somebody who means another incarnation than this one."""
    return end.id if isinstance(end, Guest) else end.peer.id
