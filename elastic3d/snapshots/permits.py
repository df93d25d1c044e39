"""Whose replicas a slot takes: what the sealed records say, and how much memory there is for it. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from elastic3d.snapshots.holdings import HOME_BUFFERS, Origin

REPLICAS = HOME_BUFFERS + 1
"""Snapshots of one rank that are held at one time: as many as its host can have, and one that takes another's place."""

_REMEMBERED = 4


class OfferVerdict(StrEnum):
    """What becomes of an offer. `unknown`: no record of that generation has come here yet, and one may."""

    TAKEN = "taken"
    UNKNOWN = "unknown"
    DENIED = "denied"


class Permits:
    """Who holds which rank, by generation: the `Node.id` of each rank, as sealed. The newest few are remembered."""

    def __init__(self) -> None:
        self._sealed: dict[int, tuple[str, ...]] = {}

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take in a record: the node of each rank, in rank order."""
        self._sealed[generation] = tuple(ranks)
        for old in sorted(self._sealed)[:-_REMEMBERED]:
            del self._sealed[old]

    def ask(self, origin: Origin, node: str) -> tuple[OfferVerdict, str]:
        """Return whether `node` may send a snapshot of that rank of that generation, and why not."""
        ranks = self._sealed.get(origin.generation)
        if ranks is None:
            newest = max(self._sealed, default=0)
            return OfferVerdict.UNKNOWN, f"generation {origin.generation} is not known here; the newest is {newest}"
        if not 0 <= origin.rank < len(ranks):
            return (
                OfferVerdict.DENIED,
                f"generation {origin.generation} has {len(ranks)} ranks, not a rank {origin.rank}",
            )
        if ranks[origin.rank] != node:
            holder = ranks[origin.rank]
            return OfferVerdict.DENIED, f"rank {origin.rank} of generation {origin.generation} is {holder}, not {node}"
        return OfferVerdict.TAKEN, ""
