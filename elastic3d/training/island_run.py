"""A run that is one of several islands: where its outer steps come between the inner ones, and what else they move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from elastic3d.clock import Clock
from elastic3d.data.ledger import Ledger, left_out
from elastic3d.errors import UsageError
from elastic3d.islands import Islands
from elastic3d.islands.member import IslandMember, Moved
from elastic3d.islands.parts import IslandParts
from elastic3d.islands.replay import ReplayedIsland
from elastic3d.islands.state import NAME


class IslandRun:
    """An island's part of a run; made before the state is loaded. around: the context of whatever waits for others."""

    def __init__(
        self,
        islands: Islands,
        parts: IslandParts,
        *,
        clock: Clock,
        around: Callable[[float], AbstractContextManager[None]],
    ) -> None:
        self._parts, self._around = parts, around
        self._member = (ReplayedIsland if islands.replay else IslandMember)(islands, parts, clock)

    def kept_with(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return what the script has kept, with the island's state; UsageError where its name is taken."""
        if extra is not None and NAME in extra:
            raise UsageError(
                f"run.restore: extra= has {NAME!r}, under which an island's own state is kept; take another name"
            )
        return {**(extra or {}), NAME: self._member.state}

    def begin(self, ledger: Ledger) -> tuple[Ledger, bool]:
        """Go on from what the other islands have done; return the ledger, and whether the run begins a round anew."""
        with self._around(self._member.longest):
            return self._followed(self._member.begin(), ledger)

    def made(self, step: int, ledger: Ledger) -> tuple[Ledger, bool]:
        """Take the outer step that follows a step, if one does; return as `begin` does."""
        if not self._member.due(step):
            return ledger, False
        with self._around(self._member.longest):
            return self._followed(self._member.made(), ledger)

    def end(self, why: str) -> None:
        """Have other islands not wait for this one any more."""
        with self._around(self._member.longest):
            self._member.leave(why)

    def _followed(self, moved: Moved | None, ledger: Ledger) -> tuple[Ledger, bool]:
        if moved is None:
            return ledger, False
        batches, assignment = self._parts.batches, self._parts.assignment
        if moved.left_at < moved.step:
            batches.order = batches.order.excluding((batches.order.positions(moved.left_at, moved.step),))
            batches.take(batches.share)
            ledger = left_out(
                ledger,
                batches.order,
                generation=assignment.generation,
                layout=str(assignment.layout),
                first_step=moved.left_at,
                stop_step=moved.step,
            )
        return ledger, True
