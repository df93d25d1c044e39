"""How training goes, where people look: a line now and then, losses that are not finite, and steps that do not come.

One node reports for all: the one with rank 0. The leader reports how many nodes the job waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from elastic3d.clock import SYSTEM, Clock
from elastic3d.port import StepRecord
from elastic3d.worker.pulse import Figures

EVERY = 10.0
"""Seconds from one line to the next."""

LATE = 60.0
"""Seconds without a step after which that is reported; where steps take longer, twice the time of the longest."""

SHOWN = 4
"""How many of the script's own numbers are in a line; all of them are in the events and in the trackers."""

PATIENCE = 3.0
"""Seconds for which the job waits for nodes before that is reported."""


class ProgressReporter:
    """Reports progress through `emit` and in `figures`. For the keeper's main thread; call `look` about once a second.

    All times are monotonic seconds. awaited: how many nodes the job waits for, as far as this one leads.
    """

    def __init__(self, emit: Callable[..., None], figures: Figures, *, clock: Clock = SYSTEM) -> None:
        self._emit, self._figures, self._clock = emit, figures, clock
        self._first = self._training = self._nonfinite = False
        self._stepped_at = self._said_at = 0.0
        self._said_step = -1
        self._longest = 0.0
        self._late_at: float | None = None
        self._logged: dict[str, float] = {}
        self.awaited = 0
        self._awaited_at, self._why = 0.0, ""

    def began(self, *, first: bool) -> None:
        """Take note that this node's trainers were started. first: rank 0 is among them."""
        now = self._clock.monotonic()
        self._first, self._training = first, True
        self._stepped_at, self._longest, self._late_at = now, 0.0, None
        self._said_at, self._said_step = now - EVERY, -1
        self.awaited = 0
        self._figures.training("")

    def over(self) -> None:
        """Take note that this node's trainers no longer run."""
        self._training = False
        self._late_at = None

    def stepped(self, record: StepRecord) -> None:
        """Take note of a step of rank 0."""
        now = self._clock.monotonic()
        self._longest = max(self._longest, now - self._stepped_at) if self._said_step >= 0 else 0.0
        self._stepped_at, self._late_at = now, None
        self._logged |= record.logged
        # A step all of whose samples are left out has no loss, and nothing is wrong with that.
        finite = math.isfinite(record.loss) or record.excluded == (record.samples,)
        if not finite and not self._nonfinite:
            self._emit("loss.nonfinite", step=record.step, loss=str(record.loss), generation=record.generation)
        self._nonfinite = not finite
        self._figures.training("" if finite else f"the loss of step {record.step} is {record.loss}")
        if now - self._said_at >= EVERY:
            self._say(record, now)

    def awaiting(self, nodes: int, why: str = "") -> None:
        """Take note of how many nodes the job waits for, 0 for none. why: those there are do not do, "" if too few."""
        if nodes and not self.awaited:
            self._awaited_at = self._clock.monotonic() + PATIENCE - EVERY
        self.awaited, self._why = nodes, why

    def look(self) -> None:
        """Report what is due even if nothing has happened."""
        now = self._clock.monotonic()
        if self.awaited and now - self._awaited_at >= EVERY:
            self._awaited_at = now
            why = f": {self._why}" if self._why else ""
            self._emit("nodes.awaited", count=self.awaited, detail=f"waiting for {self.awaited} more node(s){why}")
        if not (self._first and self._training):
            return
        seconds = now - self._stepped_at
        if seconds < max(LATE, 2 * self._longest):
            return
        self._figures.training(f"no step for {seconds:.0f} s")
        if self._late_at is None or now - self._late_at >= LATE:
            self._late_at = now
            self._emit("step.late", seconds=round(seconds, 1), detail=f"no step for {seconds:.0f} s")

    def _say(self, record: StepRecord, now: float) -> None:
        rate, left = None, None
        if 0 <= self._said_step < record.step and now > self._said_at:
            rate = (record.step - self._said_step) / (now - self._said_at)
            if record.until > record.step:
                left = _duration((record.until - record.step) / rate)
        self._emit(
            "training.progress",
            step=record.step,
            until=record.until or None,
            loss=f"{record.loss:.5g}",
            **({"logged": _few(self._logged)} if self._logged else {}),
            steps_per_second=None if rate is None else float(f"{rate:.3g}"),
            left=left,
            generation=record.generation,
        )
        self._said_at, self._said_step = now, record.step


def _few(logged: Mapping[str, float]) -> str:
    """Return the latest of what scripts logged, as a line has room for."""
    shown = [f"{name} {value:.4g}" for name, value in list(logged.items())[:SHOWN]]
    return ", ".join([*shown, f"{len(logged) - SHOWN} more"] if len(logged) > SHOWN else shown)


def _duration(seconds: float) -> str:
    """Return a time as people say it: 3h 20min, 5min 10s, 42s."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}h {minutes:02}min"
    return f"{minutes}min {whole % 60:02}s" if minutes else f"{whole}s"
