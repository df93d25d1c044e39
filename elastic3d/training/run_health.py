"""What watches over the numbers of one generation of a run, gathered for `Run`, which makes the steps.

| when | what |
|---|---|
| before the state is there | who audits, and who makes steps again whose numbers are not finite |
| once it is | what the state says is gone on from: how far audits vouch, the latest losses; the checks begin |
| with each step's passes | audits, in their own rounds; a part of the state is copied beside |
| with its vote | what was found is said, and a step that is not finite is made again |
| around its update | the state at rest is compared, and a piece of the update repeated elsewhere |

Whatever convicts a rank raises `Convicted`, upon which the port ends the process: the step is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from elastic3d.clock import Clock
from elastic3d.coverage import AuditCoverage
from elastic3d.data import Batch, Batches
from elastic3d.errors import UsageError
from elastic3d.health import vetted
from elastic3d.health.numerics import Losses, NonFinite, Spike
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.numerics.scale import LossScale
from elastic3d.parallel.numerics.update import Update
from elastic3d.parallel.vote import Outcome
from elastic3d.port import Port
from elastic3d.training import auditing, checking, redoing
from elastic3d.training.auditing import Auditor
from elastic3d.training.checking import Checks
from elastic3d.training.findings import Convicted
from elastic3d.training.going_back import GoingBack
from elastic3d.training.loss import Loss
from elastic3d.training.redoing import Redoing
from elastic3d.training.state_facts import HealthFacts

if TYPE_CHECKING:
    from elastic3d.parallel.pipeline.passes import LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Spiked:
    """A loss that jumped up. usual: the median before. why_kept: why the run does not go back, "" if nobody asked."""

    usual: float
    why_kept: str


class RunHealth:
    """The audits, checks and judgements of one generation on one rank: `begin`, `resume`, then each step's calls."""

    def __init__(self, port: Port, clock: Clock) -> None:
        self._port, self._clock = port, clock
        self._assignment = port.assignment
        self._numerics = NonFinite(port.assignment.numerics)
        self._facts = HealthFacts(losses=Losses() if port.assignment.spike != Spike.OFF else None)
        self._auditor: Auditor | None = None
        self._checks: Checks | None = None
        self._redoing: Redoing | None = None
        self._coverage: AuditCoverage | None = None
        self._going_back: GoingBack | None = None

    def begin(self, assembly: Assembly, batches: Batches) -> None:
        """Find out what can be audited and made again, and have `batches` load what that needs; a collective.

        UsageError if the options ask for what this model cannot do.
        """
        self._auditor, self._coverage = auditing.begin(assembly, batches, port=self._port, clock=self._clock)
        self._redoing = redoing.begin(assembly, batches, self._numerics, port=self._port)

    def resume(
        self,
        saved: HealthFacts,
        assembly: Assembly,
        optimizer: torch.optim.Optimizer,
        batches: Batches,
        going_back: GoingBack,
    ) -> None:
        """Go on from what the state that was loaded says; a collective. going_back: decides about spikes."""
        clean = auditing.clean_at(saved.clean, batches.step, self._assignment)
        nodes = None
        if clean is not None:
            nodes = vetted.begun(saved.clean_nodes, self._assignment.nodes, batches.step) or None
        losses = self._facts.losses if self._facts.losses is None or saved.losses is None else saved.losses
        self._facts = replace(saved, clean=clean, losses=losses, clean_nodes=nodes)
        self._going_back = going_back
        if self._auditor is not None:
            self._auditor.resume(clean, nodes, saved.nondeterminism, saved.audit_cost)
            self._coverage = self._auditor.coverage
        self._checks = checking.begin(
            assembly.mesh,
            assembly.model,
            optimizer,
            seed=batches.order.seed,
            start=batches.step,
            port=self._port,
            clock=self._clock,
        )

    @property
    def coverage(self) -> AuditCoverage | None:
        """What is audited; None where nobody asks for audits."""
        return self._coverage if self._auditor is None else self._auditor.coverage

    @property
    def checks(self) -> Checks | None:
        """The checks, whose results are said in the vote; None where nobody asks for them."""
        return self._checks

    @property
    def clean(self) -> int | None:
        """The newest step that audits of this generation vouch for; None where there are none."""
        return None if self._auditor is None else self._auditor.clean

    @property
    def facts(self) -> HealthFacts:
        """What a state that is saved now says."""
        if self._auditor is None:
            return self._facts
        return replace(
            self._facts,
            clean=self._auditor.clean,
            clean_nodes=self._auditor.clean_nodes,
            nondeterminism=self._auditor.nondeterminism,
            audit_cost=self._auditor.cost,
        )

    def made(self) -> None:
        """Note that the step is made: what it took is known."""
        if self._auditor is not None:
            self._auditor.made()

    @property
    def looks_at_micro_batches(self) -> bool:
        """Whether steps that are not finite are made again, with what was passed to them."""
        return self._redoing is not None

    @property
    def skips(self) -> bool:
        """Whether updates that are not finite are left out, whatever `run.step` was told."""
        return self._numerics is not NonFinite.OFF

    def check_skip(self) -> None:
        """Raise UsageError if `run.step(skip_nonfinite=True)` contradicts the options."""
        if self._redoing is not None:
            raise UsageError(
                f'run.step(skip_nonfinite=True) skips the whole update, and Health(numerics="{self._numerics}") does '
                "otherwise: leave one of them out"
            )

    @contextmanager
    def convicting(self) -> Iterator[None]:
        """Have the port end the process where a rank is convicted in the block."""
        try:
            yield
        except Convicted as convicted:
            self._port.convicted(convicted.report)

    def passes_begin(self) -> None:
        """Before a step's passes: copy a part of the state beside."""
        if self._checks is not None:
            self._checks.passes_begin()

    def run(self, assembly: Assembly, batch: Batch, objective: LossFunction) -> dict[int, torch.Tensor]:
        """Run the passes of a step, audited if its turn has come; return this rank's losses by micro-batch.

        A collective on audited steps. Convicted if no update may be made of them.
        """
        if batch.empty:
            return {}
        return (self._auditor or assembly.passes).run(batch, objective)

    def settle(
        self, outcome: Outcome, loss: Loss, again: Callable[[], Outcome], *, scale: LossScale, step: int
    ) -> tuple[Outcome, str]:
        """Return the outcome with which a step is made that may not be finite, and why some of it is left out.

        A collective where it is not. again: votes once more. step: the number of updates made so far.
        """
        if self._redoing is None:
            return outcome, ""
        clean = step if self.clean is None else self.clean
        return self._redoing.settle(outcome, loss, again, scaled=not scale.fixed, clean=clean)

    def before_update(self, outcome: Outcome, step: int, *, skipped: bool) -> None:
        """Judge what was said in the vote, and compare what was copied beside; Convicted if no update is to be made.

        step: the number of updates made so far. A collective if a rank says that an update looks wrong.
        """
        if self._checks is not None:
            self._checks.voted(outcome, step)
            self._checks.before_update(step, skipped=skipped)

    def updated(self, outcome: Outcome, change: Update) -> None:
        """After the update: have another rank repeat a piece of it; a collective where there is one."""
        if self._checks is not None:
            self._checks.updated(outcome, change)

    def last_step(self, step: int) -> None:
        """Before the state of a step is handed on that may have none after it: judge its vote and update; a collective.

        Convicted if they are wrong. step: the number of updates made.
        """
        if self._checks is not None:
            self._checks.last_step(step)

    def look_at_loss(self, loss: float, step: int) -> Spiked | None:
        """Note the loss of a step before its update; return what it shows if a spike begins with it, else None.

        A collective where it does. Convicted if the run goes back for it, and the step is not to be made. step: the
        number of updates made so far.
        """
        if self._facts.losses is None:
            return None
        losses, usual = self._facts.losses.after(loss)
        if usual is None:
            self._facts = replace(self._facts, losses=losses)
            return None
        why = ""
        if self._going_back is not None:
            # Where nobody audits now, what was vouched for long ago says nothing of how far to go back.
            audits = self._auditor is not None and self._auditor.nondeterminism is None
            clean = self.clean if audits else None
            why = self._going_back.consider(loss, usual, self._facts.rollbacks, clean)
        self._facts = replace(self._facts, losses=losses, spike=step)
        return Spiked(usual=usual, why_kept=why)

    def skipped(self, change: Update) -> None:
        """Note whether an update was skipped because it was not finite."""
        if change.skipped and not change.finite:
            self._facts = replace(self._facts, skipped=self._facts.skipped + 1)
