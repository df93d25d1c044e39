"""The moments of a job at which something is done to it: steps, generations, their phases, and events.

Never times alone: the same schedule meets the same job at the same place whatever the machine's speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chaos.history.follow import Picture
from elastic3d.errors import UsageError
from elastic3d.log import EVENTS
from elastic3d.nearest import nearest

_ORDERED = ("fault.ordered", "fault.injected", "fault.refused")
"""Events of `elastic3d chaos inject`, which nobody gives to a job that a schedule is played on."""


class Phase(StrEnum):
    """How far a generation is with its recovery, by the first event that says so."""

    SEALED = "sealed"
    STARTED = "started"
    RESTORED = "restored"
    STEPPED = "stepped"


_SAID_BY = {
    Phase.SEALED: "generation.sealed",
    Phase.STARTED: "trainer.started",
    Phase.RESTORED: "state.restored",
    Phase.STEPPED: "step.committed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A moment of a job: the first at which all that is given has come.

    step: it is committed. generation: it, or a later one, is sealed; with `phase`, that one is so far. event: so many
    lines of that name were written by all nodes together. Numbers count from 1; 0 and "" are for what is not given.
    """

    step: int = 0
    generation: int = 0
    phase: Phase | None = None
    event: str = ""
    count: int = 1

    def come(self, picture: Picture) -> bool:
        """Return whether the moment has come in `picture`."""
        if picture.step < self.step:
            return False
        if self.phase is not None:
            if not picture.seen.get((_SAID_BY[self.phase], self.generation), 0):
                return False
        elif self.generation and all(view.number < self.generation for view in picture.generations):
            return False
        return not self.event or picture.said(self.event) >= self.count

    def check(self, what: str, steps: int | None) -> None:
        """Raise UsageError, which begins with `what`, where it can never come. steps: of the job, None if unknown."""
        if min(self.step, self.generation) < 0 or self.count < 1:
            raise UsageError(f"{what}: steps, generations and counts are from 1 up")
        if not (self.step or self.generation or self.event):
            raise UsageError(f"{what}: it has no moment; give a step, a generation or an event")
        if self.phase is not None and not self.generation:
            raise UsageError(f"{what}: a phase is one of a generation; say which, as in generation = 2")
        if self.count > 1 and not self.event:
            raise UsageError(f'{what}: a count is of an event; say which, as in event = "peer.lost"')
        if self.event and self.event not in EVENTS:
            near = nearest(self.event, EVENTS)
            raise UsageError(f"{what}: there is no event {self.event!r}{near}")
        if self.event in _ORDERED:
            raise UsageError(f"{what}: {self.event} is of `elastic3d chaos inject`, and never comes here")
        if self.step and steps is not None and not self.step < steps:
            raise UsageError(f"{what}: the step must be from 1 to {steps - 1}, or it never comes before the end")

    def __str__(self) -> str:
        parts = [
            str(self.step) if self.step else "",
            f"g{self.generation}" if self.generation else "",
            str(self.phase or ""),
            self.event + (f" x{self.count}" if self.count > 1 else ""),
        ]
        return "@" + " ".join(filter(None, parts))
