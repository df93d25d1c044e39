"""How long a change of generation keeps a job from making steps, phase by phase, from one node's events. Pure.

A recovery begins with the last step of a generation and ends with the first one of the next. Its phases add up to it:
`notice` ends with the first sign that something happened, `seal` with the sealed generation, `restore` when rank 0 has
its state, `first_step` with the step. A generation that ends before its first step lengthens the recovery: what counts
is the last one that was sealed. A node that had no part in a generation has no recovery by the next one: it may have
stood aside for hours in which the others made steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.metrics.table import FIRST_STEP, LOSS, NOTICE, PLANNED, RESTORE, SEAL
from elastic3d.values import Cause

SIGNS = frozenset(
    {
        "peer.lost",
        "trainer.exited",
        "script.raised",
        "memory.exhausted",
        "rank.stuck",
        "node.lying",
        "state.altered",
        "vote.split",
        "update.wrong",
        "run.rolled_back",
        "generation.proposed",
    }
)
"""Events that say that the running generation may be over."""

_PLANNED = frozenset({Cause.JOIN, Cause.LEAVE, Cause.DRAIN, Cause.QUARANTINE, Cause.BALANCE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTime:
    """One recovery. kind: `LOSS` or `PLANNED`. seconds: by phase, in order."""

    kind: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.seconds.values())


class RecoveryWatch:
    """Takes a node's events in their order. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._stepped_at: float | None = None
        self._sign_at: float | None = None
        self._sealed_at: float | None = None
        self._restored_at: float | None = None
        self._kind = LOSS
        self._trains = True

    def stepped(self, at: float) -> RecoveryTime | None:
        """Take note of a step; return the recovery that it ends, None where it ends none."""
        if not self._trains:
            # Made before this node stood aside, and heard late.
            return None
        ended = self._ended(at)
        self._stepped_at, self._sign_at, self._sealed_at, self._restored_at = at, None, None, None
        return ended

    def sign(self, at: float) -> None:
        """Take note of one of `SIGNS`; the first one since the last step counts."""
        self._sign_at = at if self._sign_at is None else self._sign_at

    def sealed(self, cause: str, at: float, *, trains: bool) -> None:
        """Take note of a sealed generation. trains: whether this node does so in it."""
        self._sealed_at, self._restored_at = at, None
        self._trains = trains
        if not trains:
            self._stepped_at = self._sign_at = None
        self._kind = PLANNED if cause in _PLANNED else LOSS

    def restored(self, at: float) -> None:
        """Take note that rank 0 has its state."""
        self._restored_at = at

    def _ended(self, at: float) -> RecoveryTime | None:
        if self._stepped_at is None or self._sealed_at is None or self._restored_at is None:
            return None
        sign = self._sealed_at if self._sign_at is None else min(self._sign_at, self._sealed_at)
        marks = (self._stepped_at, sign, self._sealed_at, self._restored_at, at)
        phases = zip((NOTICE, SEAL, RESTORE, FIRST_STEP), marks, marks[1:], strict=False)
        return RecoveryTime(kind=self._kind, seconds={name: max(0.0, end - start) for name, start, end in phases})
