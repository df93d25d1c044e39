"""Where a trainer's time goes between its beginning and its first step, part by part."""

from __future__ import annotations

from collections.abc import Callable

from elastic3d.clock import Clock, processor_seconds
from elastic3d.port import Part

SCRIPT = "script"
"""The user's own code, before and after `run.shard`."""
TURN = "turn"
"""Until the device is this trainer's, where it has one at a time."""
GROUPS = "groups"
"""Meeting the other ranks, and the mesh's process groups."""
BUILDING = "building"
"""The model: outlined, built, cut and sharded."""
PREPARING = "preparing"
"""What depends on the batches: the chain's proof, the reduction, the schedule."""
AWAITING = "awaiting"
"""Until the keeper said go: the others of the generation are prepared, and those before it have left."""
LOADING = "loading"
"""Deciding which state it is, and reading it."""


class Parts:
    """Divides the time since it was made into named parts, which may come up again."""

    def __init__(self, clock: Clock, processor: Callable[[], float] = processor_seconds) -> None:
        self._clock, self._processor = clock, processor
        self._parts: dict[str, tuple[float, float]] = {}
        self._since = clock.monotonic(), processor()

    def end(self, name: str) -> None:
        """Count the time since the last part ended as part `name`."""
        now = self._clock.monotonic(), self._processor()
        before = self._parts.get(name, (0.0, 0.0))
        seconds, processor = (had + (new - old) for had, new, old in zip(before, now, self._since, strict=True))
        self._parts[name], self._since = (seconds, processor), now

    def ended(self) -> tuple[Part, ...]:
        """Return the parts in the order in which each first ended."""
        return tuple(Part(name=name, seconds=s, processor=p) for name, (s, p) in self._parts.items())
