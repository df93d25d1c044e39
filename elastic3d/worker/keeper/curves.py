"""The curves of a run, as a node's keeper has them written: which node writes, and what.

The generation's record names the node. It writes from when its trainers start until another record names another node,
it is put out, or it no longer hears from etcd and so cannot know. Every node that trains keeps the newest points: when
it is named, it has those that the former one did not write.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastic3d.clock import SYSTEM, Clock
from elastic3d.port import StateRestored, StepRecord
from elastic3d.trackers.choice import Named
from elastic3d.trackers.points import Point, Points, Void
from elastic3d.trackers.turn import Turn
from elastic3d.trackers.writing import TrackerWriter
from elastic3d.values import Generation, Node

PATIENCE = 10.0
"""Seconds that the end of a run waits for what is not written."""


class Curves:
    """Called on the keeper's main thread. trackers: none where nobody asked for curves; then nothing is kept."""

    def __init__(
        self, trackers: Sequence[Named], *, run_id: str, emit: Callable[..., None], clock: Clock = SYSTEM
    ) -> None:
        self._run_id, self._clock = run_id, clock
        self._points = Points()
        self._writers = [
            TrackerWriter(one.name, one.tracker, self._points, run_id=run_id, emit=emit, clock=clock)
            for one in trackers
        ]
        self._waiting: Turn | None = None

    def sealed(self, generation: Generation, me: Node) -> None:
        """Take note of a generation's record: what it leaves out, and whether another node writes from now on."""
        if self._writers:
            self._points.leave_out(voids(generation))
            if not _writes(generation, me):
                self.stop()

    def began(self, generation: Generation, me: Node) -> None:
        """Take note that this node's trainers are started in a generation."""
        self._waiting = None
        self.sealed(generation, me)
        if not self._writers or not _writes(generation, me):
            return
        turn = Turn(generation=generation.number, config=self._config(generation, me), voids=voids(generation))
        if self._points.newest:
            self._begin(turn)
        else:
            self._waiting = turn

    def restored(self, state: StateRestored) -> None:
        """Take note of the state that the run goes on from.

        Nobody may have lived to tell of its last step, of which it knows the loss. Where this node has heard of no step
        at all, what the storage has must say first where it goes on.
        """
        if self._waiting is not None:
            turn, self._waiting = self._waiting, None
            self._begin(replace(turn, restored=max(0, state.step)))
        elif 0 < self._points.newest == state.step - 1 and state.loss:
            values = {"loss": float.fromhex(state.loss), "generation": state.generation}
            self._add(Point(step=state.step, generation=state.generation, at=self._clock.wall(), values=values))

    def stepped(self, record: StepRecord, generation: Generation) -> None:
        """Take note of a step."""
        if not self._writers:
            return
        values = values_of(record, generation)
        self._add(Point(step=record.step, generation=record.generation, at=self._clock.wall(), values=values))

    def etcd(self, *, there: bool) -> None:
        """Write nothing while etcd is away: a generation in which another node writes may be there."""
        for writer in self._writers:
            writer.hold(not there)

    def stop(self) -> None:
        """Write no more: another node does, or this one was put out."""
        self._waiting = None
        for writer in self._writers:
            writer.stop()

    def look(self) -> None:
        """Report what is due even if nothing has happened."""
        for writer in self._writers:
            writer.look()

    def finish(self) -> None:
        """Write what is left, while others finish their work; `wait` for it afterwards."""
        deadline = self._clock.monotonic() + PATIENCE
        for writer in self._writers:
            writer.finish(deadline)

    def wait(self) -> None:
        """Wait for what is left, for a bounded time, and report what is not written."""
        for writer in self._writers:
            writer.wait()

    def _add(self, point: Point) -> None:
        self._points.add(point)
        for writer in self._writers:
            writer.heard()

    def _begin(self, turn: Turn) -> None:
        for writer in self._writers:
            writer.begin(turn)

    def _config(self, generation: Generation, me: Node) -> dict[str, str | int]:
        return {
            "run": self._run_id,
            "node": me.name,
            "generation": generation.number,
            "nodes": len(generation.nodes),
            "ranks": generation.world,
            "layout": str(generation.layout) if generation.layout is not None else "",
        }


def values_of(record: StepRecord, generation: Generation) -> dict[str, float]:
    """Return what is written of a step: our own numbers, of the names in `trackers.names`, and the script's."""
    first, stop = record.samples
    samples = stop - first - sum(last - begin for begin, last in record.excluded)
    return {
        "loss": record.loss,
        **({"gradient_norm": record.gradient_norm} if record.gradient_norm is not None else {}),
        **({"noise_scale": record.noise_scale} if record.noise_scale is not None else {}),
        "step_seconds": record.seconds,
        **({"samples_per_second": samples / record.seconds} if record.seconds > 0 else {}),
        "generation": record.generation,
        "nodes": len(generation.nodes),
        "ranks": generation.world,
        **{sys.intern(name): value for name, value in record.logged.items()},
    }


def voids(generation: Generation) -> tuple[Void, ...]:
    """Return which points are not part of the run any more, by a generation's record.

    A run that went back for a spike makes the steps up to there again as they were, though it may begin before.
    """
    steps = {rule.before: rule.step for rule in generation.distrusted}
    steps |= {back.before: back.step for back in generation.rollbacks}
    return tuple(Void(before=before, step=step) for before, step in sorted(steps.items()))


def _writes(generation: Generation, me: Node) -> bool:
    return generation.writer < len(generation.nodes) and generation.nodes[generation.writer].id == me.id
