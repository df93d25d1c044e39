"""A loss that jumped up: whether the run goes back for it, decided alike by every rank before the step's update.

That a loss has jumped up, how often the run went back, and what it would leave out, follows from votes and from the
state alone. Whether there is a state to go back to is no such fact, so that rank 0 looks, and all go by its word: in
memory, where states that old are rare, and in the store. Neither bits nor holes depend on which one it is (`rollback`).
The beginning counts as one where no more would be made again than is left out.

Where a run is audited, only states that audits vouch for count: what jumped up may have been a device's doing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.data import Batches
from elastic3d.distrust import Distrust, with_rule
from elastic3d.errors import StateError
from elastic3d.health.numerics import Spike, left_out_from
from elastic3d.health.phases import Phase
from elastic3d.parallel.assembly import Assembly
from elastic3d.port import Assignment, Audited, AuditReport, Go, Progress
from elastic3d.rollback import MOST, WITHIN, Rollback, exhausted
from elastic3d.training import restoring
from elastic3d.training.findings import Convicted


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingBack:
    """Decides about spikes in one generation."""

    assignment: Assignment
    tiers: restoring.Tiers
    assembly: Assembly
    batches: Batches
    go: Go
    progress: Progress

    def consider(self, loss: float, usual: float, rollbacks: Sequence[Rollback], clean: int | None) -> str:
        """Raise Convicted, which ends the generation, if the run goes back for a spike; else say why it does not.

        "" where nobody asked for it. A collective. loss, usual: of the step that is not made yet, and before it.
        rollbacks: those of the run so far. clean: the newest step that audits vouch for, None where there are none.
        """
        given, step = self.assignment, self.batches.step
        if given.spike != Spike.ROLLBACK:
            return ""
        if not given.audit_acts:
            return "only reported: act='log' has training go on, though spike='rollback' asks for more"
        # Those that the job knows of count too, so that it ends even if what they leave out is forgotten each time.
        known = sorted({*rollbacks, *self.go.rollbacks}, key=lambda one: (one.before, one.spike))
        if exhausted((one.spike for one in known), step):
            before = ", ".join(str(one.spike) for one in known[-MOST:])
            return (
                f"only reported: the run went back {MOST} times within {WITHIN} steps already, for spikes in steps "
                f"{before}. It is not single samples then: look at the learning rate, the data and the model"
            )
        order = self.batches.order
        first = left_out_from(order, step, given.rollback_steps)
        back = Rollback(
            before=given.generation + 1,
            step=first,
            spike=step,
            first=order.positions(first)[0],
            stop=order.positions(step)[1],
        )
        newest = first if clean is None else min(first, clean)
        self.progress.phase(Phase.RESTORE)
        mine = json.dumps(self._older(back, newest)).encode() if given.rank == 0 else None
        older, why = json.loads(self.assembly.mesh.broadcast(mine))
        self.progress.phase(Phase.REDUCE)
        if older < 0:
            return f"only reported: {why}"
        detail = (
            f"the loss of step {step} is {loss:.4g}, where {usual:.4g} was usual: the run goes back to the state of "
            f"step {older}, and leaves out steps {first} to {step}, positions {back.first} to {back.stop - 1}"
        )
        # Nothing but the beginning is there to go back to: no step of this run counts as reached then.
        clean = newest if older else 0
        raise Convicted(AuditReport(kind=Audited.SPIKED, step=step, clean=clean, rollback=back, detail=detail))

    def _older(self, back: Rollback, newest: int) -> tuple[int, str]:
        """Return the step of the state that the run would go back to, or -1 and why there is none."""
        given, go = self.assignment, self.go
        known = restoring.Known(
            generation=back.before,
            newest=back.spike,
            reached=go.reached,
            fresh=given.fresh,
            wanted=given.restore,
            distrusted=with_rule(go.distrusted, Distrust(before=back.before, step=newest)),
            rollbacks=(*go.rollbacks, back),
        )
        try:
            decided = restoring.decide(self.tiers, go.servers, given.store, self.assembly.specs, known)
        except StateError as error:
            return -1, f"there is no older state to go back to: {error}"
        begins = decided.source == restoring.NONE or restoring.is_foreign(decided)
        if decided.step <= newest and (not begins or back.near_the_beginning):
            return decided.step, ""
        more = "a store keeps older ones than memory does (store=, every=)" if given.store is None else "see every="
        return -1, f"no state of at most {newest} steps is in memory or in the store; {more}"
