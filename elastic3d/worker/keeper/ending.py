"""How a run ends: the last state goes to the store before the other nodes learn that `main` has returned.

A job is over, and its memory gone, once every node has said that it has finished. A node therefore says so only when
its slots' parts of the last step are written; the leader ends the job when they are committed (`leader._over`).
"""

from __future__ import annotations

from collections.abc import Callable

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import events as m
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.trainer_group import TrainerGroup

END_PATIENCE = 240.0
"""Seconds for which writing the last step is tried: twice as long as one write retries a busy store. After that it
counts as a failure, and the generation's next try has as long again."""


class Ending:
    """Called on the keeper's main thread. checkpoints: None without a store. tell: for events to the membership."""

    def __init__(
        self,
        generations: Generations,
        checkpoints: Checkpoints | None,
        tell: Callable[[m.Event], None],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._generations, self._checkpoints, self._tell, self._clock = generations, checkpoints, tell, clock
        self._error = ""

    @property
    def pause(self) -> float | None:
        """Seconds after which to look again even if nothing has happened; None for never."""
        return 0.1 if any(world.returned_at is not None for world in self._generations.worlds.values()) else None

    def heard(self, event: TilesUploaded | WriteFailed) -> None:
        """Take note of how a write ended, before the membership learns of it."""
        for world in self._generations.worlds.values():
            if world.returned_at is not None and world.flushing:
                world.wrote(event, world.unsaved, self._clock.monotonic())
                if isinstance(event, WriteFailed) and event.step == world.unsaved:
                    self._error = event.error

    def look(self) -> None:
        """Report that `main` has returned once its last state is in the store, or that it could not be written."""
        now = self._clock.monotonic()
        for key, world in list(self._generations.worlds.items()):
            if world.returned_at is None:
                continue
            if self._checkpoints is not None and world.unsaved >= 0:
                if not world.flushing:
                    self._error = ""
                world.write(self._checkpoints, world.unsaved, now)
                if len(world.flushed) < len(world.trainers):
                    if now > world.returned_at + END_PATIENCE:
                        del self._generations.worlds[key]
                        self._tell(m.TrainerFailed(key=key, detail=self._failure(world), error=True))
                    continue
            del self._generations.worlds[key]
            self._generations.finished = True
            self._tell(m.MainFinished(key=key))

    def _failure(self, world: TrainerGroup) -> str:
        why = self._error or f"it was not written within {END_PATIENCE:g} s"
        return (
            f"main returned, but the last step, {world.unsaved}, could not be brought to the store: {why}. See to the "
            "store; until the job's tries are used up it is tried again, and after that the job, started again, goes "
            "on from its newest checkpoint"
        )
