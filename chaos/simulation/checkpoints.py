"""A minimal checkpoint store: `latest` with a fence, as the format of checkpoints describes it."""

from __future__ import annotations

from random import Random

from chaos.simulation.loop import Loop


class Checkpoints:
    """A leader's number is swapped into `latest` before it commits; leaders with an older one are refused."""

    def __init__(self, loop: Loop, random: Random) -> None:
        self._loop, self._random = loop, random
        self._fence = 0
        self._newest = 0
        self.refused = 0
        self.committed: list[tuple[int, int]] = []
        self.violations: list[str] = []

    def fence(self, number: int) -> None:
        """Put up the fence of a generation, a moment later."""
        self._loop.later(self._random.uniform(0.005, 0.3), self._put_up, number)

    def _put_up(self, number: int) -> None:
        if number >= self._fence:
            self._fence = self._newest = number
        else:
            self.refused += 1

    def commit(self, number: int, step: int) -> None:
        """Commit a step's checkpoint in generation `number`, a moment later."""
        self._loop.later(self._random.uniform(0.3, 1.0), self._commit, number, step)

    def _commit(self, number: int, step: int) -> None:
        if not self._takes(number):
            self.refused += 1
            return
        if number < self._newest:
            self.violations.append(
                f"at {self._loop.now:.3f}: generation {number} committed step {step} after {self._newest}"
            )
        self.committed.append((number, step))

    def _takes(self, number: int) -> bool:
        return number == self._fence
