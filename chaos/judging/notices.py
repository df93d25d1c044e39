"""Who noticed what was done to a job, and how soon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.faults.fault import Fault, Replay
from chaos.history.follow import Event
from chaos.playing.play import Outcome

_NOTED_LATE = 1.0
"""Seconds by which a fault within the script may be noted after it has happened, and after somebody has noticed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Who noticed a fault. after: seconds from what was done to the detector's first event, None if there was none."""

    fault: Fault
    detector: str
    after: float | None


def notices(outcome: Outcome, events: Sequence[Event]) -> Iterator[Notice]:
    """Yield who noticed what was done, for each fault that was made and that somebody has to notice."""
    for fault, at in outcome.made:
        detector = fault.ABOUT.detector
        if detector:
            begin = at - _NOTED_LATE if fault.ABOUT.replay is Replay.EXACT else at
            after = [max(0.0, event.at - at) for event in events if event.name == detector and event.at >= begin]
            yield Notice(fault=fault, detector=detector, after=min(after, default=None))
