"""What the first keeper of a node says of its silent ranks: one stall of all ranks of the running generation.

Each slot's watch reports its own ranks. When the first of them is silent the others are followed, so that the stall
says of each what it is at; while some of the node's ranks stand still and others move, the stall shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import events as m
from elastic3d.membership.stalls import RankStall, Stall
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort

EACH = 0.5
"""Least seconds between two stalls that are reported."""

PATIENCE = 1.0
"""Seconds for which a stall waits for ranks that were not heard of: a companion keeper that hangs must not hide it."""


class Silence:
    """Called on the keeper's main thread; `look` whenever something has happened, and after `pause`.

    tell: for events to the membership. emit: for those of people.
    """

    def __init__(
        self,
        slots: Sequence[SlotPort],
        tell: Callable[[m.Event], None],
        *,
        emit: Callable[..., None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._slots, self._tell, self._emit, self._clock = slots, tell, emit, clock
        self._key = self._incarnation = ""
        self._trainers: dict[int, int] = {}
        self._ranks: dict[int, RankStall] = {}
        self._over: set[int] = set()
        self._ended: set[int] = set()
        self._changed = self._reported = self._following = False
        self._began_at = self._reported_at = 0.0

    @property
    def pause(self) -> float | None:
        """Seconds after which to look again even if nothing has happened; None for never."""
        return 0.1 if self._changed else None

    def begin(self, key: str, incarnation: str, trainers: Mapping[int, int]) -> None:
        """Gather the ranks of another generation from now on. trainers: their numbers by slot."""
        self.over()
        self._key, self._incarnation, self._trainers = key, incarnation, dict(trainers)

    def over(self) -> None:
        """Gather nothing any more: no generation runs here, or another one does."""
        if self._reported:
            self._tell(m.RanksMoving(key=self._key))
        self._trainers, self._ranks = {}, {}
        self._over, self._ended = set(), set()
        self._changed = self._reported = self._following = False

    def heard(self, event: w.RankSilent | w.RankMoving) -> None:
        """Take note of what a slot's watch says of its rank."""
        if self._trainers.get(event.slot) != event.trainer:
            return
        if isinstance(event, w.RankMoving):
            self._over.discard(event.slot)
            stall = self._ranks.pop(event.slot, None)
            if stall is not None:
                self._emit("rank.moving", slot=event.slot, rank=stall.rank)
        else:
            if event.over and event.slot not in self._over:
                self._say(event)
            self._ranks[event.slot] = event.rank
            (self._over.add if event.over else self._over.discard)(event.slot)
            if event.over and not self._following:
                self._began_at, self._following = self._clock.monotonic(), True
                self._follow(True)
        if not self._over:
            self._settle()
        else:
            self._changed = True

    def ended(self, slot: int, trainer: int) -> None:
        """Take note that a trainer has ended; what its watch said last of it came before, and stays."""
        if self._trainers.get(slot) != trainer:
            return
        self._ended.add(slot)
        if self._ranks.get(slot) is None:
            self._over.discard(slot)

    def look(self) -> None:
        """Report the stall if it has changed and is complete, or has waited for long enough."""
        now = self._clock.monotonic()
        if not self._changed or now - self._reported_at < EACH:
            return
        known = set(self._ranks) | self._ended
        if known < set(self._trainers) and now - self._began_at < PATIENCE:
            return
        self._changed, self._reported, self._reported_at = False, True, now
        ranks = tuple(self._ranks[slot] for slot in sorted(self._ranks))
        self._tell(m.RanksSilent(stall=Stall(incarnation=self._incarnation, key=self._key, ranks=ranks)))

    def _say(self, event: w.RankSilent) -> None:
        rank = event.rank
        self._emit(
            "rank.silent",
            generation=int(self._key.partition(".")[0]),
            slot=event.slot,
            rank=rank.rank,
            step=rank.step,
            phase=rank.phase,
            state=str(rank.state),
            seconds=rank.silent / 1000,
            waits=f"{rank.wait.axis} {rank.wait.number}" if rank.wait is not None else None,
            odd=rank.odd or None,
            frame=rank.top_frame or None,
        )

    def _follow(self, on: bool) -> None:
        for slot, trainer in self._trainers.items():
            if slot not in self._ended:
                self._slots[slot].follow(trainer, on)

    def _settle(self) -> None:
        """Take the stall back: no rank of this node is silent any more."""
        if self._following:
            self._following = False
            self._follow(False)
        self._ranks.clear()
        self._changed = False
        if self._reported:
            self._reported = False
            self._tell(m.RanksMoving(key=self._key))
