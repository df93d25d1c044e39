"""What is said of a step that was made: the vote's outcome, and how long it took."""

from __future__ import annotations

import math

from elastic3d.clock import Clock, processor_seconds
from elastic3d.data import Batches
from elastic3d.data.ledger import Ledger
from elastic3d.log import process_log
from elastic3d.parallel.vote import Outcome
from elastic3d.port import Assignment, StepRecord
from elastic3d.snapshots.interval import Interval
from elastic3d.training.batch_control import Resized
from elastic3d.training.loss import Loss
from elastic3d.training.run_health import Spiked
from elastic3d.training.scalars import Agreed
from elastic3d.training.state_facts import HealthFacts


def unmeasured(error: Exception) -> None:
    """Report that a device's time cannot be had: nobody is found to be slow by this rank's steps."""
    process_log().emit("device.unmeasured", error=f"{type(error).__name__}: {error}"[:500])


class StepTimer:
    """Counts each step's seconds, of the clock and of the processor, from the step before."""

    def __init__(self, assignment: Assignment, clock: Clock) -> None:
        self._assignment, self._clock = assignment, clock
        self._since = self._processor = 0.0

    def begin(self) -> None:
        """Count from now."""
        self._since, self._processor = self._clock.monotonic(), processor_seconds()

    def record(
        self,
        batches: Batches,
        outcome: Outcome,
        loss: Loss,
        *,
        norm: float | None,
        interval: Interval,
        why: str,
        spiked: Spiked | None,
        health: HealthFacts,
        ledger: Ledger,
        clean: int | None,
        data: float,
        copy: float,
        agreed: Agreed,
        resized: Resized,
    ) -> StepRecord:
        """Return the record of the step that `batches` has just counted, and count the next one from now.

        norm: of the gradient, before clipping. why: some micro-batches were left out, "" if that was not found in this
        step. spiked: if a spike begins with it. health, ledger: of the state that it leaves. clean: the newest
        step that audits of this generation vouch for. data, copy: seconds of it that went to waits for the data loader,
        and for the copy of a snapshot. agreed: what the ranks' scripts said of it.
        resized: what it has shown of the gradient's noise.
        """
        since, processor = self._since, self._processor
        self.begin()
        made = batches.step - 1
        samples, excluded = batches.order.positions(made), batches.order.positions_of(made, loss.batch.excluded)
        return StepRecord(
            generation=self._assignment.generation,
            step=batches.step,
            loss=outcome.loss,
            gradient_norm=norm,
            seconds=self._since - since,
            safe_step=outcome.safe_step,
            etcd_away_everywhere=outcome.etcd_away,
            samples=samples,
            sample_sum=outcome.sample_sum,
            until=batches.goal,
            snapshot_every=interval.every,
            snapshot_rank=outcome.snapshot_rank if outcome.snapshot_needs > 1 else -1,
            processor=self._processor - processor,
            excluded=excluded,
            why_excluded=why,
            usual=None if spiked is None else spiked.usual,
            why_kept="" if spiked is None else spiked.why_kept,
            left_out=batches.order.micro_batches_of(made, sum(line.excluded for line in ledger)),
            skipped=health.skipped,
            spike=health.spike,
            sheets=outcome.sheets if self._assignment.slot == 0 else (),
            clean=-1 if clean is None else clean,
            data=data,
            read=batches.read,
            copy=copy,
            tokens=batches.tokens(made, loss.batch.excluded),
            logged=dict(agreed.scalars) if self._assignment.slot == 0 else {},
            stopped=agreed.stop,
            resized=resized.why,
            noise_scale=None if resized.scale is None or math.isinf(resized.scale) else resized.scale,
        )
