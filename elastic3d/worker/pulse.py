"""The figures of a node's work for people, in the pulse that its member writes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from elastic3d.coverage import AuditCoverage
from elastic3d.health.sheet import Row, sheet_of
from elastic3d.health.slow_node import SlowNode
from elastic3d.membership.records import HealthFigures, Pulse, SlowFigures
from elastic3d.port import StepRecord

WELL = "ok"

KEPT = 1000
"""Newest steps of which it is known when they were made: without snapshots none of them ever becomes safe."""


class Figures:
    """The newest step, snapshot and checkpoint, and when they were made. All times are monotonic.

    Written on the keeper's threads and read on the member's: each field is replaced as a whole.

    watch: how ranks are watched, None where nobody does.
    """

    def __init__(self, watch: HealthFigures | None = None) -> None:
        self._watch = watch
        self._step: tuple[int, float, float | None] = (-1, 0.0, None)
        self._snapshot: tuple[int, float] | None = None
        self._checkpoint: tuple[int, float] | None = None
        self._verified: tuple[int, float] | None = None
        self._vetted: tuple[int, float] | None = None
        self._unvetted = ""
        self._health, self._failed = WELL, -1
        self._snapshot_every = self._until = 0
        self._busy = -1.0
        self._made: deque[tuple[int, float]] = deque()
        self._stale = self._training = self._store = ""

    def training(self, trouble: str) -> None:
        """Take note of what is wrong with the training itself, "" for nothing."""
        self._training = trouble

    def store(self, trouble: str) -> None:
        """Take note of what is wrong with the store's size, "" for nothing."""
        self._store = trouble

    def stepped(self, record: StepRecord, now: float) -> None:
        """Take note of a step. A snapshot is as old as its step, as far as this node saw it."""
        loss = record.loss if math.isfinite(record.loss) else None  # records of numbers that are not are not read
        self._step = (record.step, record.seconds, loss)
        if self._watch is not None:
            self._watch = replace(
                self._watch,
                clean=record.clean,
                left_out=record.left_out,
                skipped=record.skipped,
                spike=record.spike,
            )
        self._snapshot_every, self._until = record.snapshot_every, record.until
        oldest = max(record.safe_step, record.step - KEPT)
        while self._made and self._made[-1][0] >= record.step:
            self._made.pop()
        while self._made and self._made[0][0] < oldest:
            self._made.popleft()
        self._made.append((record.step, now))
        if record.safe_step >= 0 and (self._snapshot is None or self._snapshot[0] != record.safe_step):
            first, at = self._made[0]
            self._snapshot = (record.safe_step, at if first == record.safe_step else now)

    def sheet(self, row: Row) -> None:
        """Take note of what the newest steps of this node's first rank went into; () where that was not told."""
        sheet = sheet_of(row)
        if sheet is not None and sheet.total > 0:
            self._busy = round(min(1.0, sheet.busy / sheet.total), 3)

    def slow(self, slow: Mapping[str, SlowNode]) -> None:
        """Take note of which nodes are slow, by id."""
        if self._watch is not None:
            rows = tuple(
                SlowFigures(
                    node=id.partition("@")[0],
                    rho=round(node.rho, 3),
                    kind=str(node.kind),
                    since=node.since,
                    cost=round(node.cost, 4),
                    detail=node.detail,
                    ranks=node.ranks,
                )
                for id, node in sorted(slow.items())
            )
            self._watch = replace(self._watch, slow=rows)

    def begin(self) -> None:
        """Take note that another generation begins: nothing is known yet of what it looks at."""
        self.audits(None)
        self._busy = -1.0
        if self._watch is not None:
            self._watch = replace(self._watch, unchecked=())

    def unchecked(self, where: str, why: str) -> None:
        """Take note that something is not checked in this generation, though the run asks for it."""
        said = f"{where}: {why}"
        if self._watch is not None and said not in self._watch.unchecked:
            self._watch = replace(self._watch, unchecked=(*self._watch.unchecked, said))

    def audits(self, coverage: AuditCoverage | None) -> None:
        """Take note of what audits see from now on; None: no generation trains here yet."""
        if self._watch is not None:
            self._watch = replace(self._watch, coverage=coverage, clean=-1 if coverage is None else self._watch.clean)

    def stale(self, detail: str) -> None:
        """Take note that the safe step is too old, or with "" that it no longer is."""
        self._stale = detail

    def committed(self, step: int, now: float) -> bool:
        """Take note of a committed checkpoint; return whether that ends a trouble."""
        self._checkpoint = (step, now)
        return self._mended()

    def verified(self, step: int, now: float) -> None:
        """Take note of a checkpoint that was read back and is good."""
        self._verified = (step, now)

    def vetted(self, step: int, now: float) -> None:
        """Take note of the newest checkpoint of whose making every node was audited. now: when that was found out."""
        self._vetted, self._unvetted = (step, now), ""

    def unvetted(self, why: str) -> None:
        """Take note of why there is none, "" for nothing that is known."""
        self._vetted, self._unvetted = None, why

    def wrote(self, step: int) -> bool:
        """Take note that this node's part of a checkpoint is in the store; return whether that ends a trouble."""
        return step > self._failed and self._mended()

    def behind(self) -> tuple[int | None, str]:
        """Return the step of the newest checkpoint, None for none, and why there is no newer one, "" if all is well."""
        step = None if self._checkpoint is None else self._checkpoint[0]
        return step, "" if self._health == WELL else self._health

    def checkpoint_age(self, now: float) -> float | None:
        """Return the seconds since the newest commit that this node made, None if it made none."""
        return None if self._checkpoint is None else now - self._checkpoint[1]

    def _mended(self) -> bool:
        was, self._health = self._health, WELL
        return was != WELL

    def failed(self, step: int, error: str) -> None:
        """Take note of a checkpoint that could not be written."""
        self._failed = step
        self._health = f"checkpoint of step {step} failed: {error}"

    def pulse(self, state: str, generation: int, now: float) -> Pulse:
        """Return the pulse at `now`."""
        step, seconds, loss = self._step
        snapshot_step, snapshot_age = _ago(self._snapshot, now)
        checkpoint_step, checkpoint_age = _ago(self._checkpoint, now)
        verified_step, verified_age = _ago(self._verified, now)
        vetted_step, vetted_age = _ago(self._vetted, now)
        return Pulse(
            state=state,
            generation=generation,
            every=0.0,
            step=step,
            step_seconds=seconds,
            loss=loss,
            snapshot_step=snapshot_step,
            snapshot_age=snapshot_age,
            snapshot_every=self._snapshot_every,
            checkpoint_step=checkpoint_step,
            checkpoint_age=checkpoint_age,
            verified_step=verified_step,
            verified_age=verified_age,
            vetted_step=vetted_step,
            vetted_age=vetted_age,
            unvetted=self._unvetted,
            watch=self._watch,
            until=self._until,
            busy=self._busy,
            health="; ".join(p for p in (self._training, self._health, self._stale, self._store) if p and p != WELL)
            or WELL,
        )


def _ago(made: tuple[int, float] | None, now: float) -> tuple[int, float]:
    return (-1, -1.0) if made is None else (made[0], max(0.0, now - made[1]))
