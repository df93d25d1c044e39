"""How an outer step comes to be sealed, as one island sees it: by another one, or by itself."""

from __future__ import annotations

from typing import Any

from elastic3d.errors import StateError
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.options import Islands
from elastic3d.islands.record import Sealed, SentDelta, awaited, following
from elastic3d.log import process_log
from elastic3d.quantities import seconds
from elastic3d.values import to_json


class SealedStep:
    """Waits for an outer step to be sealed, and seals it when all are there, or patience is over. For rank 0."""

    def __init__(self, islands: Islands, exchange: Exchange, outer: int, island: str) -> None:
        self._islands, self._exchange, self._outer, self._island = islands, exchange, outer, island
        self._before: Sealed | None = None
        self._said = ""

    def look(self, waited: float) -> Any | None:
        """Return the record as JSON has it, None while there is none; StateError below the minimum for too long."""
        exchange = self._exchange
        sealed = exchange.sealed(self._outer)
        if sealed is not None:
            return to_json(sealed)
        if self._before is None:
            self._before = exchange.sealed(self._outer - 1)
        before = self._before
        if before is None:
            raise StateError(
                f"outer step {self._outer - 1} has no record in {exchange.place} any more: objects were removed there. "
                "Trying again does not help: restore them, or give the islands another store"
            )
        sent: dict[str, SentDelta] = exchange.sent(self._outer)
        left = exchange.left()
        missing, there = awaited(before, sent, left), [one for one in sent if one in before.members]
        late = waited > seconds(self._islands.patience, "patience")
        mine = following(before, sent, joined=exchange.joined(), left=left, by=self._island)
        # Those that ask to be admitted count, or nobody could ever take the place of one that is gone.
        enough = len(there) + (len(mine.admitted) if late or not missing else 0) >= self._islands.minimum
        if enough and (late or not missing):
            return to_json(exchange.seal(mine))
        why = f"outer step {self._outer} waits for {', '.join(missing)}"
        if not enough and not missing:
            why = f"outer step {self._outer} has {len(there)} of at least {self._islands.minimum} islands (minimum=)"
        if waited > seconds(self._islands.longest, "longest"):
            raise StateError(
                f"{why}, for {waited:.0f} s (Islands(longest=)). Nothing is lost: started again, the island goes on "
                "from there once others are there; or take a smaller minimum="
            )
        if why != self._said and waited > 1.0:
            self._said = why
            process_log().emit("island.waiting", why="others", detail=why)
        return None
