"""What the tests of trackers have in common: events that were emitted, points, and waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from elastic3d.clock import SYSTEM, Clock
from elastic3d.trackers.points import Point, Points
from elastic3d.trackers.tracker import Position, Tracker
from elastic3d.trackers.turn import Turn
from elastic3d.trackers.writing import TrackerWriter

CONFIG: Mapping[str, str | int] = {"run": "r", "node": "a", "generation": 1, "nodes": 1, "ranks": 1, "layout": "pp1"}


def values(step: int, generation: int = 1, salt: float = 0.0) -> dict[str, float]:
    return {"loss": 10.0 / step + salt, "generation": generation}


def put(tracker: Tracker, first: int, last: int, *, generation: int = 1, salt: float = 0.0) -> None:
    """Write the steps first..last, and flush."""
    for step in range(first, last + 1):
        tracker.write(step, values(step, generation, salt), 1000.0 + step)
    tracker.flush()


def eventually(check: Callable[[], object], seconds: float = 20.0) -> bool:
    """Wait until something holds."""
    until = SYSTEM.monotonic() + seconds
    while not check():
        if SYSTEM.monotonic() > until:
            return False
        SYSTEM.sleep(0.005)
    return True


class Shelf:
    """The storage that trackers of two nodes share, with all that it was ever sent."""

    def __init__(self) -> None:
        self.points: dict[int, dict[str, float]] = {}
        self.sent: list[int] = []
        self.broken = self.forgets = False
        self.gate: threading.Event | None = None


class Shelved(Tracker):
    """A tracker of a user: writes to a shelf at once."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.opened, self.closed = 0, 0

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        self.opened += 1
        if not self.shelf.points:
            return None
        step = max(self.shelf.points, key=lambda at: (self.shelf.points[at]["generation"], at))
        return Position(step, int(self.shelf.points[step]["generation"]))

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        if self.shelf.gate is not None:
            self.shelf.gate.wait(30)
        if self.shelf.broken:
            raise OSError("no space left")
        self.shelf.sent.append(step)
        self.shelf.points[step] = dict(values)

    def rewind(self, step: int) -> bool:
        if self.shelf.forgets:
            self.shelf.points = {at: one for at, one in self.shelf.points.items() if at <= step}
        return self.shelf.forgets

    def close(self) -> None:
        self.closed += 1


class Writing:
    """One node's writer of a shelf."""

    def __init__(self, shelf: Shelf, *, kept: int = 1000, clock: Clock = SYSTEM) -> None:
        self.points, self.tracker = Points(kept), Shelved(shelf)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.writer = TrackerWriter(
            "shelf", self.tracker, self.points, run_id="r", emit=self._emit, pace=0.01, rest=0.01, clock=clock
        )

    def _emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def add(self, first: int, last: int, *, generation: int = 1, salt: float = 0.0) -> None:
        for step in range(first, last + 1):
            point = Point(step=step, generation=generation, at=1.0, values=values(step, generation, salt))
            self.points.add(point)
        self.writer.heard()

    def begin(self, generation: int = 1, **more: Any) -> None:
        self.writer.begin(Turn(generation=generation, config=CONFIG, **more))

    def end(self, seconds: float = 10.0) -> None:
        self.writer.finish(SYSTEM.monotonic() + seconds)
        self.writer.wait()

    def said(self, name: str) -> list[dict[str, Any]]:
        return [fields for said, fields in self.events if said == name]
