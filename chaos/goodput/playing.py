"""One policy over one trace: nodes come and go in virtual time, and a ledger is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from chaos.goodput.ledger import Account, Ledger
from chaos.goodput.lives import Crowd, Life
from chaos.simulation.loop import Loop

SLICE = 600.0
"""Virtual seconds between two reports of progress."""

Report = Callable[[float], None]


class Play(ABC):
    """A policy says what happens when a node is ready, and when one is lost.

    enough: the fewest nodes that any layout can use. start: seconds from when a node is held until it is ready.
    """

    def __init__(self, name: str, crowd: Crowd, loop: Loop, *, enough: int, start: float) -> None:
        self.crowd, self.loop, self._start = crowd, loop, start
        self.ledger = Ledger(name, enough)

    @abstractmethod
    def ready(self, host: int) -> None:
        """A node has started, and can be used."""

    @abstractmethod
    def lost(self, host: int, active: bool) -> None:
        """A node was taken away. active: it trained, or was about to."""

    def tidy(self) -> None:  # noqa: B027 - most policies remember nothing
        """Forget what nobody needs any more; called once in a while."""

    def play(self, report: Report = lambda share: None) -> Account:
        """Play the whole trace and return the account. report: called with the share that has been played."""
        for at, by, life in self.crowd.changes():
            self.loop.at(at, self._arrive if by > 0 else self._leave, life)
        end = self.crowd.end
        while self.loop.now < end:
            self.loop.run(min(end, self.loop.now + SLICE))
            self.tidy()
            report(self.loop.now / end)
        return self.ledger.close(end)

    def _arrive(self, life: Life) -> None:
        self.ledger.arrive(life.host, self.loop.now)
        if life.at + self._start < life.until:
            self.loop.later(self._start, self.ready, life.host)

    def _leave(self, life: Life) -> None:
        self.lost(life.host, self.ledger.depart(life.host, self.loop.now))
