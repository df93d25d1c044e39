"""What follows from a step's numbers, as functions of what all ranks have voted: pure.

Every rank decides for itself, and all decide alike, in whatever layout: the values are voted, and what they are
compared with is part of the state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic3d.data.holes import Holes  # its package imports torch, for which no command should wait
    from elastic3d.data.positions import Order

MOST_EMPTY = 10
"""Steps in a row that may come out with nothing to learn from, before it is no longer taken for the data's fault."""


class NonFinite(StrEnum):
    """What follows when the loss or the gradient of a step is not finite."""

    OFF = "off"
    """The step is made, as in a plain script; in fp16 its update is skipped."""
    STEP = "step"
    """Its update is skipped."""
    SKIP = "skip"
    """The micro-batches that it comes from are left out, and the step is made of the others."""
    STOP = "stop"
    """The run ends, and says what it comes from."""


KEPT = 128
"""Losses that a new one is compared with."""

FEWEST = 32
"""Losses without which nothing is said."""

LATEST, HIGH = 5, 3
"""So many of the latest steps are looked at, and so many of them have to be high."""

ABOVE, SPREADS = 0.5, 8.0
"""How far above the median a loss is high: by this share of it, and by so many times its usual spread."""

NORMAL = 1.48
"""A normal distribution's standard deviation, in median absolute deviations."""


ROLLBACK_STEPS = 100
"""Steps that a run goes back for a spike, unless it is told otherwise: by the time it shows, what began it is older."""


class Spike(StrEnum):
    """What follows when the loss jumps up, and stays there for some steps."""

    LOG = "log"
    """It is reported."""
    ROLLBACK = "rollback"
    """The run goes back, and leaves out the steps that led to it."""
    OFF = "off"
    """Nothing: losses are not kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The latest losses of a run, part of its state, so that every layout and every restart judges alike.

    losses: the last `KEPT` that were finite, in hexadecimal. high: for the last `LATEST` of them whether they were
    high, "1" or "0" each. spiked: that was said, and there has been a high one among the latest ever since.
    """

    losses: tuple[str, ...] = ()
    high: str = ""
    spiked: bool = False

    def after(self, loss: float) -> tuple[Losses, float | None]:
        """Return the losses with that of one more step, and their median if a spike shows with it, else None.

        A spike is `HIGH` high losses among the latest; a single outlier is none. One is said once.
        """
        if not math.isfinite(loss):
            return self, None
        before = [float.fromhex(one) for one in self.losses]
        usual = statistics.median(before) if before else loss
        high = (self.high + ("1" if is_high(loss, before) else "0"))[-LATEST:]
        spikes = high.count("1") >= HIGH
        now = Losses(
            losses=(*self.losses, loss.hex())[-KEPT:], high=high, spiked=spikes or (self.spiked and "1" in high)
        )
        return now, usual if spikes and not self.spiked else None


def is_high(loss: float, before: Sequence[float]) -> bool:
    """Return whether a loss is far above those before it; False where they are too few to tell."""
    if len(before) < FEWEST:
        return False
    middle = statistics.median(before)
    spread = NORMAL * statistics.median(abs(one - middle) for one in before)
    return loss > middle + ABOVE * abs(middle) and loss > middle + SPREADS * spread


def leaves_of(micro_batches: tuple[int, ...], leaf: int) -> tuple[int, ...]:
    """Return the leaves that have any of these micro-batches, in order."""
    return tuple(sorted({number // leaf for number in micro_batches}))


def members(leaves: tuple[int, ...], leaf: int) -> tuple[int, ...]:
    """Return all micro-batches of some leaves, in order: a leaf is added up before a part of it could be left out."""
    return tuple(number * leaf + inner for number in sorted(leaves) for inner in range(leaf))


def empty_before(order: Order, step: int, most: int = MOST_EMPTY, known: Holes = ()) -> int:
    """Return how many steps in a row before `step` have all their micro-batches excluded, at most `most`.

    known: positions that were left out before anybody tried them. Steps of those alone are passed over.
    """
    count, at = 0, step - 1
    while count < most and at >= 0 and order.empty(at):
        first, stop = order.positions(at)
        count += sum(max(0, min(end, stop) - max(begin, first)) for begin, end in known) < stop - first
        at -= 1
    return count


def left_out_from(order: Order, step: int, distance: int) -> int:
    """Return from which step on a run that goes back for a spike in `step` leaves its steps out, up to that one.

    `distance` of them, steps of which nothing was learned not counted; in a young run half of those there were.
    """
    at, wanted = step + 1, min(distance, (step + 2) // 2)
    while at > 0 and wanted > 0:
        at -= 1
        wanted -= not order.empty(at)
    return at
