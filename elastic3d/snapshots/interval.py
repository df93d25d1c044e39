"""How many steps lie between two snapshots, where the user leaves that open: as many as keep their cost in bounds.

A snapshot costs the step that has to wait for its copy (`Cost.stalled`), and it costs what the trainers could use
meanwhile: the link to the buddy and the cores that hash (`Cost.moved`). Each rank measures both and says in the step
vote how many steps apart snapshots would have to be for it (`Cost.needed`). The most that any rank needs is what all
take from that step on (`Interval`), so that all take the same snapshots.

To leave half of the link alone costs no safety. With a transfer of T seconds, snapshots taken whenever there is room
queue behind each other, and the safe step is 2 T to 3 T old; taken 2 T apart, none waits, and it is T to 3 T old.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

STALL_SHARE = 0.03
"""The most of the training's time that waiting for copies may take."""

MOVE_SHARE = 0.5
"""The most of the time in which snapshots are hashed and sent."""

STALL_TRIFLE, MOVE_TRIFLE = 0.005, 0.05
"""Seconds of a snapshot's stall and transfer that are not counted: too few to lose steps for."""

SAMPLES = 8
LEAST_SAMPLES = 3

AUTO = "auto"
"""What a user says who leaves it open; None where it is a number otherwise."""


def at_risk(every: int) -> int:
    """Return how many steps the death of a node may cost while `every` steps lie between two snapshots.

    Those up to the next snapshot, those in which that is sent, and the one whose vote tells of it.
    """
    return math.ceil((1.0 + MOVE_SHARE) * every) + 1


class Cost:
    """What the last snapshots cost one rank. All times are seconds.

    The least of the last few counts: what a busy host adds to a measurement is not what a snapshot costs, and the first
    ones write to memory that was never touched before.
    """

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=SAMPLES)
        self._moves: deque[float] = deque(maxlen=SAMPLES)
        self._steps: deque[float] = deque(maxlen=SAMPLES)

    def stalled(self, seconds: float) -> None:
        """Take note of how long training waited for one snapshot in all."""
        self._stalls.append(seconds)

    def moved(self, seconds: float) -> None:
        """Take note of how long it took to hash a snapshot and to send it to the buddy."""
        self._moves.append(seconds)

    def stepped(self, seconds: float) -> None:
        """Take note of how long a step took."""
        self._steps.append(seconds)

    def needed(self) -> float:
        """Return the least number of steps between snapshots that keeps both costs within their shares; 0.0 while that
        is not known."""
        if len(self._steps) < LEAST_SAMPLES:
            return 0.0
        step = max(statistics.median(self._steps), 1e-6)
        stall = _counted(self._stalls, STALL_TRIFLE) / (STALL_SHARE * step)
        move = _counted(self._moves, MOVE_TRIFLE) / (MOVE_SHARE * step)
        return max(stall, move)


def _counted(seconds: deque[float], trifle: float) -> float:
    return max(0.0, min(seconds) - trifle) if len(seconds) >= LEAST_SAMPLES else 0.0


class Interval:
    """The steps from one snapshot to the next in one generation, alike on every rank. fixed: the user's, None for none.

    Widened at once and by any amount; narrowed only when half would do, so that it does not waver.
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed
        self._every = 1 if fixed is None else fixed
        self._last = 0

    @property
    def every(self) -> int:
        """The number of steps, 0 for no snapshots."""
        return self._every

    def voted(self, needed: float) -> None:
        """Take note of the most that any rank needs, as a vote gave it to all."""
        if self._fixed is not None:
            return
        least = max(1, math.ceil(needed))
        if least > self._every or 2 * least <= self._every:
            self._every = least

    def taken(self, step: int) -> None:
        """Count from this step on: its state was there to be taken."""
        self._last = step

    def due(self, step: int) -> bool:
        """Return whether to take a snapshot of this step."""
        if self._fixed is None:
            return step - self._last >= self._every
        return bool(self._every) and step % self._every == 0
