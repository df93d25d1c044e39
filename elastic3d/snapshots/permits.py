"""Whose replicas a slot accepts: what the sealed records allow, and how many. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from elastic3d.snapshots.holdings import HOME_BUFFERS, Origin

REPLICAS = HOME_BUFFERS + 1
"""Snapshots of one rank held at a time: as many as its own host can have, and one that replaces another."""

_REMEMBERED = 4


class OfferVerdict(StrEnum):
    """The verdict on an offer. `unknown`: no record of that generation has arrived yet, but one may."""

    TAKEN = "taken"
    UNKNOWN = "unknown"
    DENIED = "denied"


class Permits:
    """The node of each rank by generation: its `Node.id`, as sealed. The newest few generations are remembered."""

    def __init__(self) -> None:
        self._sealed: dict[int, tuple[str, ...]] = {}

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take a record: the node of each rank, in rank order."""
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
