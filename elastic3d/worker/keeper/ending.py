"""How a run ends: what `main` left goes to the store before the others hear that it returned.

A job is over once every node has said that it has finished, and its memory goes with it. So a node says so only when
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
"""Seconds that writing the last step is tried: twice what one write takes that the store keeps waiting. Then it is a
failure, and the generation's next try has them again."""


class Ending:
    """Called on the keeper's main thread. checkpoints: None without a store. tell: what the membership hears."""

    def __init__(
        self,
        generations: Generations,
        checkpoints: Checkpoints | None,
        tell: Callable[[m.Event], None],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._generations, self._checkpoints, self._tell, self._clock = generations, checkpoints, tell, clock
        self._again: dict[int, float] = {}
        self._error = ""

    @property
    def pause(self) -> float | None:
        """Seconds after which to look again though nothing has happened; None for never."""
        return 0.1 if any(world.returned_at is not None for world in self._generations.worlds.values()) else None

    def heard(self, event: TilesUploaded | WriteFailed) -> None:
        """Take note of what came of a write, before the membership hears of it."""
        step = event.saved.step if isinstance(event, TilesUploaded) else event.step
        for world in self._generations.worlds.values():
            if world.returned_at is None or world.unsaved != step or not world.flushing:
                continue
            if isinstance(event, WriteFailed):
                self._error = event.error
                self._again[event.slot] = self._clock.monotonic() + event.rest
            elif event.saved.made_in == world.generation.number and event.saved.attempt == world.generation.attempt:
                world.flushed.add(event.slot)

    def look(self) -> None:
        """Tell that `main` has returned, once what it left is in the store; or that it could not be brought there."""
        now = self._clock.monotonic()
        for key, world in list(self._generations.worlds.items()):
            if world.returned_at is None:
                continue
            if self._checkpoints is not None and world.unsaved >= 0:
                self._write(self._checkpoints, world, now)
                if len(world.flushed) < len(world.trainers):
                    if now > world.returned_at + END_PATIENCE:
                        del self._generations.worlds[key]
                        self._tell(m.TrainerFailed(key=key, detail=self._failure(world), error=True))
                    continue
            del self._generations.worlds[key]
            self._generations.finished = True
            self._tell(m.MainFinished(key=key))

    def _write(self, checkpoints: Checkpoints, world: TrainerGroup, now: float) -> None:
        if not world.flushing:
            world.flushing = True
            self._again.clear()
            self._error = ""
            world.flushed |= checkpoints.flush(world.unsaved, world.generation)
        for slot in [slot for slot, due in self._again.items() if due <= now]:
            del self._again[slot]
            checkpoints.retry(slot, world.unsaved, world.generation)

    def _failure(self, world: TrainerGroup) -> str:
        why = self._error or f"it was not written within {END_PATIENCE:g} s"
        return (
            f"main returned, but the last step, {world.unsaved}, could not be brought to the store: {why}. See to the "
            "store; until the job's tries are used up it is tried again, and after that the job, started again, goes "
            "on from its newest checkpoint"
        )
