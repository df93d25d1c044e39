"""The part of `links` in finding a second witness (`witness`): ask other nodes, and try to connect where they ask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic3d.membership.actions import RingPeer
from elastic3d.membership.driver.messages import Answer, Ask
from elastic3d.membership.driver.wire import Dial, Guest
from elastic3d.membership.driver.witness import Conclusion, Inquiries, Tries, TryResult


@dataclass(frozen=True, slots=True, kw_only=True)
class InquiryOutcome:
    """The outcome of asking about `id`. evidence: of its death, "" for none. lives: others reach it.

    doubt: what people are told if it is not dead.
    """

    id: str
    evidence: str = ""
    lives: bool = False
    doubt: str = ""


class Asking:
    """Asks other nodes about those that refuse this one."""

    def __init__(self) -> None:
        self._inquiries: Inquiries[Dial | Guest] = Inquiries()

    @property
    def due(self) -> float | None:
        """The latest time to look again, None for never."""
        return self._inquiries.due

    def ask(self, refused: Dial, others: Sequence[Dial | Guest], now: float) -> None:
        """Ask `others`, a connection to each, about one that refuses; not again until that is answered."""
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
        """Ask about this id no more."""
        self._inquiries.forget(id)

    def concluded(self, now: float) -> list[InquiryOutcome]:
        """Return the outcomes of the inquiries that are over."""
        return [_outcome(*one) for one in self._inquiries.concluded(now)]


def _outcome(id: str, evidence: str, conclusion: Conclusion, witness: Dial | Guest | None) -> InquiryOutcome:
    if witness is not None:
        return InquiryOutcome(id=id, evidence=f"{evidence}, and {id_of(witness).partition('@')[0]} found the same")
    if conclusion is Conclusion.LIVES:
        why = f"{evidence}, but other nodes reach {id} there: is there a firewall between it and this node?"
        return InquiryOutcome(id=id, lives=True, doubt=why)
    why = f"{evidence}, and no other neighbour could tell: {id} counts as silent until one can"
    return InquiryOutcome(id=id, doubt=why)


class Trying:
    """Tries to connect to this node's neighbours when others ask."""

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
        """The latest time to look again, None for never."""
        return self._tries.due

    def arrange(self, near: Iterable[RingPeer], now: float) -> list[Dial]:
        """Try only these from now on; return the tries that this ends."""
        self._near = {peer.id: peer for peer in near}
        over = [dial for id, dial in self._dials.items() if self._near.get(id) != dial.peer]
        for dial in over:
            self.conclude(dial, TryResult.UNKNOWN, now)
        return over

    def asked(self, by: Dial | Guest, ask: Ask, now: float, *, neighbour: bool) -> Dial | None:
        """Answer, or note that the asker waits; return the try to begin, if any. neighbour: the asker is one."""
        peer = self._near.get(ask.id)
        verdict: TryResult | None = TryResult.UNKNOWN
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

    def conclude(self, dial: Dial, verdict: TryResult, now: float) -> None:
        """End a try, and answer those who asked for it."""
        del self._dials[dial.peer.id]
        for end, number in self._tries.conclude(dial.peer.id, verdict, now):
            end.say(Answer(number=number, verdict=verdict))

    def lost(self, end: Dial | Guest) -> None:
        """Take note that a connection ended."""
        self._tries.lost(end)

    def overdue(self, now: float) -> list[Dial]:
        """End the tries that take too long, and return them."""
        over = [self._dials[id] for id in self._tries.overdue(now)]
        for dial in over:
            self.conclude(dial, TryResult.UNKNOWN, now)
        return over


def id_of(end: Dial | Guest) -> str:
    """Return the id at the other end, "" for a guest that means another incarnation than this one."""
    return end.id if isinstance(end, Guest) else end.peer.id
