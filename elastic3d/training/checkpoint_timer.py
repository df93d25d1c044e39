"""When the next checkpoint is due."""

from __future__ import annotations

from elastic3d.clock import Clock
from elastic3d.port import Assignment


class CheckpointTimer:
    """One rank's count of steps and seconds since the checkpoint before; the step vote makes one decision of all."""

    def __init__(self, assignment: Assignment, clock: Clock) -> None:
        self._assignment, self._clock = assignment, clock
        self._asked = False
        self.count_from(0)

    def ask(self) -> None:
        """Let a checkpoint be due now, whatever the numbers say."""
        self._asked = True

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`: what no rank was ready for stays due."""
        if self._asked:
            return True
        every, seconds = self._assignment.checkpoint_every, self._assignment.checkpoint_seconds
        if seconds and self._clock.monotonic() - self._saved_at >= seconds:
            return True
        return bool(every) and step // every > self._saved_step // every

    def count_from(self, step: int) -> None:
        """Count steps and seconds from now, the generation being at `step`."""
        self._saved_step, self._saved_at = step, self._clock.monotonic()

    def begun(self, step: int) -> None:
        """Take note that a checkpoint of `step` begins: it is the one that was asked for too."""
        self.count_from(step)
        self._asked = False
