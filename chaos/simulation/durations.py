"""How long trainers take for what they do: by default a time drawn, or the same for all."""

from __future__ import annotations

from random import Random

from elastic3d.values import Generation

SAVED = 5
"""Each of so many steps is saved."""


class Durations:
    """Times of a job's trainers, in seconds; a subclass knows a model and its machines.

    build: least and most that is drawn for building trainers. step: of each step.
    """

    def __init__(self, *, build: tuple[float, float], step: float) -> None:
        self._build, self._step = build, step

    def building(self, random: Random) -> float:
        """Return the seconds in which a node's trainers are built, beside those that run."""
        return random.uniform(*self._build)

    def loading(self, generation: Generation, *, stored: bool) -> float:
        """Return the seconds between the beginning of a generation and that of its first step.

        stored: its state comes from a checkpoint.
        """
        return 0.0

    def step(self, generation: Generation) -> float:
        """Return the seconds of a step of nodes that are alike."""
        return self._step

    def behind(self, generation: Generation) -> int:
        """Return by how many steps the copy of a snapshot at the buddy is behind the newest, 1 or more."""
        return 1

    def saved(self, generation: Generation, step: int, now: float) -> int:
        """Return the step whose checkpoint is whole now that `step` was made, 0 for none."""
        return step if step % SAVED == 0 else 0

    def reported(self, generation: Generation, step: int, now: float) -> bool:
        """Return whether members are told of this step."""
        return True
