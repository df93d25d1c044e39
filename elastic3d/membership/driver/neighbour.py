"""How long a neighbour may be silent, learnt from its own beats.

Patience grows with the gaps a neighbour has shown: one that was late by a second on its busy host a moment ago is given
two and a half before it counts as silent, but never more than `LONGEST`. (The idea is that of accrual failure
detectors, Hayashibara et al., SRDS 2004; the worst gap needs no model of how gaps are distributed.)
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 3.0
"""Seconds of silence that are reported whatever gaps it has shown: a lease, after which etcd suspects it anyway."""

TIMES = 2.5
"""How many times the worst gap that a neighbour has shown lately it may be silent."""

LATELY = 60.0
"""Seconds for which the worst gap is remembered."""


@dataclass(slots=True)
class Neighbour:
    """What is known of one id: whether it is heard, None for not yet known, and until when it may be silent.

    heard_at: when it was heard last, 0.0 for never. worst, worst_at: the longest gap between two beats lately.
    """

    silent_at: float
    alive: bool | None = None
    heard_at: float = 0.0
    worst: float = 0.0
    worst_at: float = 0.0

    def heard(self, now: float, silence: float) -> None:
        """Take in a beat, and set the patience for the next by the gaps so far."""
        gap = now - self.heard_at if self.alive and self.heard_at else 0.0
        if gap >= self.worst or now - self.worst_at >= LATELY:
            self.worst, self.worst_at = gap, now
        self.heard_at = now
        self.silent_at = now + min(max(silence, TIMES * self.worst), max(silence, LONGEST))

    def forgive(self, lost: float) -> None:
        """Take `lost` seconds off its silence."""
        self.silent_at += lost
        self.heard_at += lost if self.heard_at else 0.0
