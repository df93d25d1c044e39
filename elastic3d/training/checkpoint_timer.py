"""When the next checkpoint is due: on the count of a run, which its generations hand on with its state in memory.

A generation may end before its checkpoint is due, or while the store is still busy with the one before. If each one
counted anew, a job that loses nodes more often than every half an hour would never save under `every="30m"`, and what
`run.save()` asked for would be lost. So the step vote says what is waited for, the same on all ranks, and snapshots
carry it. A state from the store begins a count of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.clock import Clock
from elastic3d.port import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaved:
    """What a state says of its run's last checkpoint.

    due: the next one is, and has waited for the store. seconds: of training since the last one began, as the slowest
    rank counts them; 0.0 where checkpoints go by steps.
    """

    due: bool = False
    seconds: float = 0.0


NOTHING_UNSAVED = Unsaved()
"""What there is to say where a count begins."""


class CheckpointTimer:
    """One rank's count of steps and seconds since the checkpoint before; the step vote makes one decision of all."""

    def __init__(self, assignment: Assignment, clock: Clock) -> None:
        self._assignment, self._clock = assignment, clock
        self.unsaved = NOTHING_UNSAVED
        """What the last vote said, for the states that are made from here on."""
        self._asked = False
        self.begin(0, NOTHING_UNSAVED)

    def begin(self, step: int, unsaved: Unsaved) -> None:
        """Go on from a state of `step`, which says this of the last checkpoint."""
        self.unsaved = unsaved
        self._asked |= unsaved.due
        self._saved_step, self._saved_at = step, self._clock.monotonic() - unsaved.seconds

    def ask(self) -> None:
        """Let a checkpoint be due now, whatever the numbers say."""
        self._asked = True

    @property
    def seconds(self) -> float:
        """Seconds since the last checkpoint began, 0.0 where checkpoints go by steps."""
        return max(0.0, self._clock.monotonic() - self._saved_at) if self._assignment.checkpoint_seconds else 0.0

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`: what no rank was ready for stays due."""
        if self._asked:
            return True
        every, seconds = self._assignment.checkpoint_every, self._assignment.checkpoint_seconds
        if seconds and self.seconds >= seconds:
            return True
        return bool(every) and step // every > self._saved_step // every

    def voted(self, step: int, *, begins: bool, unsaved: Unsaved) -> None:
        """Take what was decided of `step`. begins: its checkpoint does, which is the one that was asked for too."""
        if begins:
            self._asked = False
            self.begin(step, NOTHING_UNSAVED)
        else:
            self.unsaved = unsaved
