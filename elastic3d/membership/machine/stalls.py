"""What all members say of ranks that stand still, for the leader: kept up to date with each stall."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic3d.membership.machine.reports import discard
from elastic3d.membership.stalls import Stall, aged, outline


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """A stall, as it was at `heard` by this member's clock, and the revision since which it stands."""

    stall: Stall
    created: int
    heard: float


class Stalls:
    """The stall of each member that has one, by id.

    version: counts the changes of what they say; changed_at: when the last was. That time passes is no change.
    """

    def __init__(self) -> None:
        self.version = 0
        self.changed_at = 0.0
        self._standing: dict[str, _Standing] = {}
        self._by_key: dict[str, dict[str, None]] = {}

    def ids(self) -> tuple[str, ...]:
        """Return the ids that have a stall."""
        return tuple(self._standing)

    def count(self, key: str) -> int:
        """Return how many members say something of the generation `key`."""
        return len(self._by_key.get(key, ()))

    def of(self, key: str, ids: Iterable[str], now: float) -> dict[str, Stall]:
        """Return the stalls of the generation `key` among those of `ids`, their times those of now."""
        said = self._by_key.get(key, {})
        standing = ((id, self._standing[id]) for id in ids if id in said)
        return {id: aged(one.stall, now - one.heard) for id, one in standing}

    def created(self, ids: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Return (id, the revision since which its stall stands) of those of `ids` that have one."""
        return tuple((id, self._standing[id].created) for id in ids if id in self._standing)

    def hear(self, id: str, stall: Stall, created: int, now: float) -> None:
        """Take in a stall."""
        known = self._standing.get(id)
        if known is None or known.created != created or outline(known.stall) != outline(stall):
            self.version, self.changed_at = self.version + 1, now
        if known is not None:
            discard(self._by_key, known.stall.key, id)
        self._standing[id] = _Standing(stall=stall, created=created, heard=now)
        self._by_key.setdefault(stall.key, {})[id] = None

    def missed(self, seconds: float, now: float) -> None:
        """Take in that this member did not run for so long until now: what it heard before is no older for that."""
        for id, one in self._standing.items():
            self._standing[id] = replace(one, heard=min(now, one.heard + seconds))

    def forget(self, id: str, now: float) -> None:
        """Take in that a member's stall is gone."""
        known = self._standing.pop(id, None)
        if known is not None:
            discard(self._by_key, known.stall.key, id)
            self.version, self.changed_at = self.version + 1, now
