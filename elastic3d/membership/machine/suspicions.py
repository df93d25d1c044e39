"""Whom the judge suspects and since when, from which members call which silent, and what it has asked about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.generation_index import Ring
from elastic3d.membership.machine.partition import Cut, Suspect, cuts_of, made, suspects
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View

PROVEN = 3.3
"""Seconds after which a new connection of the ring would have been reported silent if it were: the time that a first
beat may take, plus the way of the report."""


@dataclass(slots=True)
class Suspicions:
    """Whom the judge suspects, since when, and when it asked, by the question's mark; the core keeps it.

    main: by suspect, since when the judge has stood in main without a break.
    pending: whether some suspect is dead will be known soon.
    """

    since: dict[str, float] = field(default_factory=dict)
    main: dict[str, float] = field(default_factory=dict)
    asked: dict[str, dict[str, float]] = field(default_factory=dict)
    doubts: int = 0
    pending: bool = False
    _rings: list[tuple[Ring, float]] = field(default_factory=list)
    _suspects: tuple[Suspect, ...] = ()
    _key: tuple[Ring, Ring | None, frozenset[str], frozenset[str], frozenset[Cut]] | None = None

    def follow(self, view: View, now: float) -> None:
        """Take note of when the ring changed. Call it after all news."""
        ring = view.ring
        if not self._rings or self._rings[-1][0] is not ring:
            self._rings.append((ring, now))
        while len(self._rings) > 1 and self._rings[1][1] + PROVEN <= now:
            del self._rings[0]

    def suspects(self, view: View, roster: Roster, alarm: Alarm) -> tuple[Suspect, ...]:
        """Return the members cut off from this one's side. Costs the ring's length only when a silence came or went."""
        if not roster.reports.accusing:
            return ()
        ring, me = view.ring, view.me.node.id
        silent = ((id, other) for id in roster.reports.accusing for other in roster.reports[id].silent)
        out = frozenset(id for id in view.tombs if id in ring.index)
        ids, index = _closed(ring, out)
        cuts = cuts_of(ids, index, silent)
        before, gone = self._proven(view, alarm)
        key = (ring, before, out, gone, cuts)
        if self._key is None or self._key[0] is not ring or self._key[1] is not before or self._key[2:] != key[2:]:
            members = view.index
            fresh = frozenset[Cut]()
            if before is not ring or gone != out:
                fresh = made(ids, {} if before is None else _closed(before, gone)[1])
            self._suspects = suspects(ids, cuts, members.node_ranks if members is not None else {}, me, fresh)
            self._key = key
        return self._suspects

    def _proven(self, view: View, alarm: Alarm) -> tuple[Ring | None, frozenset[str]]:
        """Return the ring whose connections are proven by now, None for none, and the members then out of it."""
        (ring, since), *later = self._rings
        if later:
            alarm.due(later[0][1] + PROVEN)
        if not alarm.due(since + PROVEN):
            return None, frozenset()
        return ring, frozenset(id for id, at in view.tombs_at.items() if id in ring.index and alarm.due(at + PROVEN))

    def took(self, id: str, mark: str, seen: float) -> float:
        """Return the seconds after which this question was `seen`: the answer may take as long. 0 if others asked."""
        return max(0.0, seen - self.asked.get(id, {}).get(mark, seen))


def _closed(ring: Ring, out: frozenset[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the ids of the ring without those that are out, and their index."""
    if not out:
        return ring.ids, ring.index
    ids = tuple(id for id in ring.ids if id not in out)
    return ids, {id: at for at, id in enumerate(ids)}
