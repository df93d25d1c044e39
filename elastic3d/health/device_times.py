"""What a rank's steps go into on a device, where calls return before their work is done: by the device's own time.

A mark is queued behind the work so far wherever the host notes that something else begins: a phase, a wait, the blocks
of a stage. The device notes the time when it gets there, and what lies between two marks went into what the first one
began. A pass is as long as the device takes for it, however early its calls have returned. Where the device waits for
other ranks, that lies between the marks of the wait, and where it waits for the host, in the phase that the host is in.
So all of a step is counted once, as on the host.

Nothing here waits for the device. A step is read when a later one ends: all ranks have voted then, each after its
passes, so that the device has gone past the end of the step before. Where it has not, the step is read later.

What a driver refuses of this ends the measuring, and not the training: the rank has no rows from then on, so that in
this generation nobody is found to be slow, and that is reported once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from elastic3d.health.sheet import StepTimes

if TYPE_CHECKING:
    from elastic3d.devices import Mark, Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Began:
    """What began at a mark. axis: of a wait, None outside of one. blocks: within those of a stage."""

    mark: Mark
    phase: int
    axis: int | None
    blocks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeStep:
    """A step that was made. at: nanoseconds of the monotonic clock, when its last call returned. Rest: see `sheet`."""

    step: int
    at: int
    rounds: int
    passes: int
    read: int
    fresh: bool


class DeviceTimes:
    """One rank's. Called where the rank's record is written, and on the same threads.

    failed: called once, with what went wrong, if the device's time cannot be had any more.
    """

    def __init__(self, stopwatch: Stopwatch, phase: int, failed: Callable[[Exception], None]) -> None:
        self._stopwatch: Stopwatch | None = stopwatch
        self._failed = failed
        self._phase, self._blocks = phase, False
        self._axis: int | None = None
        self._begun: list[_Began] = []
        self._made: deque[tuple[MadeStep, list[_Began]]] = deque()
        self._mark()

    def phase(self, phase: int) -> None:
        """Note that another phase begins."""
        self._phase, self._blocks = phase, False
        self._mark()

    def wait(self, axis: int) -> None:
        """Note that the work that is queued from here on waits for other ranks."""
        self._axis = axis
        self._mark()

    def leave(self) -> None:
        """Note that it does no longer."""
        self._axis = None
        self._mark()

    def blocks(self, *, inside: bool) -> None:
        """Note that a stage's blocks are entered or left."""
        self._blocks = inside
        self._mark()

    def step(self, made: MadeStep) -> None:
        """Note that a step was made, and the next one begins."""
        self._mark()
        if self._stopwatch is not None:
            self._made.append((made, self._begun))
            self._begun = self._begun[-1:]

    def read(self) -> Iterator[tuple[MadeStep, StepTimes]]:
        """Yield the steps whose end the device has reached and that were not read before, oldest first.

        Of the newest one only, nothing is read before the next one is made.
        """
        while (stopwatch := self._stopwatch) is not None and len(self._made) > 1:
            made, begun = self._made[0]
            try:
                if not stopwatch.reached(begun[-1].mark):
                    return
                times = self._times(stopwatch, made, begun)
                stopwatch.forget([one.mark for one in begun[:-1]])
            except Exception as error:  # noqa: BLE001  # whatever a driver raises
                self._end(error)
                return
            self._made.popleft()
            yield made, times

    def _times(self, stopwatch: Stopwatch, made: MadeStep, begun: list[_Began]) -> StepTimes:
        times = StepTimes(rounds=made.rounds, passes=made.passes, read=made.read)
        for one, following in pairwise(begun):
            spent = stopwatch.nanoseconds(one.mark, following.mark)
            if one.axis is not None:
                times.waited[one.axis] += spent
                continue
            times.spent[one.phase] += spent
            times.blocks += spent if one.blocks else 0
        return times

    def _mark(self) -> None:
        if self._stopwatch is None:
            return
        try:
            mark = self._stopwatch.mark()
        except Exception as error:  # noqa: BLE001  # as above
            self._end(error)
            return
        self._begun.append(_Began(mark=mark, phase=self._phase, axis=self._axis, blocks=self._blocks))

    def _end(self, error: Exception) -> None:
        self._stopwatch = None
        self._made.clear()
        self._begun = []
        self._failed(error)
