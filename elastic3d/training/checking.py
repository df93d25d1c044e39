"""Checks on one rank of what audits do not repeat: its state at rest, the outcome of votes, and its updates.

| what | how | found by |
|---|---|---|
| state at rest | a rotating part is copied where the passes begin, and compared before the vote | its own rank |
| votes | a number for the last outcome goes with the next vote, and by itself where there is none | all ranks |
| updates | every tenth step, a small piece is computed again by a rank of another node (`health/recheck`) | all ranks |

What a rank finds about its own state is said by it alone, which then leaves the step: the others lose a peer, and all
go on from the last state that is held twice, which is one before. Of votes and updates all ranks judge alike, before
the next update; the state that the wrong one made is not gone on from (`AuditReport.clean`).

Costs: at rest, at most `Assignment.at_rest` of the time (measured, `custody.LookBudget`) and 64 MiB; for a vote 8 bytes
a rank and 7 us; for an update at most 1 MiB sent and 1.6 ms of one core, each tenth step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from elastic3d.clock import Clock
from elastic3d.health import custody
from elastic3d.health.record import fingerprint
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.numerics.update import Update
from elastic3d.parallel.vote import Outcome
from elastic3d.port import Audited, AuditReport, Port
from elastic3d.training.at_rest import AtRest
from elastic3d.training.findings import AuditedRank, end, nodes_of
from elastic3d.training.updates import Updates

_LAST = 14
"""Kind of the step with which a last vote is compared, for its fingerprint."""


class Checks:
    """All checks of one generation. `begin` makes one."""

    def __init__(
        self,
        mesh: Mesh,
        optimizer: Optimizer,
        *,
        model: nn.Module,
        peers: Sequence[AuditedRank],
        seed: int,
        start: int,
        port: Port,
        clock: Clock,
    ) -> None:
        """Begin at step `start`."""
        self._mesh, self._peers, self._port = mesh, peers, port
        self._rest = AtRest(model, optimizer, port=port, clock=clock, seed=seed)
        self._updates = Updates(mesh, optimizer, peers=peers, seed=seed, start=start, port=port, clock=clock)
        self._last = 0.0
        self._split_told = False

    def passes_begin(self) -> None:
        """Copy a part of the state beside; nothing is to write to it before `before_vote`."""
        self._rest.copy()

    def before_vote(self, step: int) -> None:
        """Compare what was copied beside; Convicted where bits have changed: without this rank's vote, nobody's step.

        step: the number of updates made so far.
        """
        self._rest.compare(step)

    @property
    def last(self) -> float:
        """A number for the outcome of the last vote, 0.0 for none, to be said in the next one."""
        return self._last

    @property
    def disputes(self) -> bool:
        """Whether another rank's update came to other bits here, to be said in the next vote."""
        return self._updates.differs

    def voted(self, outcome: Outcome, step: int) -> None:
        """Judge what ranks said in the vote of a step, before its update; Convicted if the update is not to be made.

        step: the number of updates made so far. A collective if a rank says that an update looks wrong.
        """
        self._judge(outcome.last_outcomes, outcome.disputed_by, step)

    def last_step(self, step: int) -> None:
        """Judge a vote and an update after which there is no vote, for all leave or the run ends; as `voted`."""
        self._port.progress.begin_step(fingerprint(_LAST))
        mine = json.dumps([self._last, self._updates.differs]).encode()
        said = [json.loads(data) for data in self._mesh.gather(mine)]
        self._judge([last for last, _ in said], [rank for rank, (_, disputes) in enumerate(said) if disputes], step)

    def _judge(self, outcomes: Sequence[float], disputed_by: Sequence[int], step: int) -> None:
        devices = [peer.device for peer in self._peers]
        split = custody.split(outcomes, [peer.node for peer in self._peers], devices)
        if split is not None and not self._split_told:
            report = AuditReport(
                kind=Audited.SPLIT,
                step=step - 1,
                where="the outcome of its vote",
                ranks=split.odd,
                nodes=nodes_of(split.odd, self._peers),
                detail=split.detail,
                clean=step - 1,
            )
            self._split_told = True
            end(self._port, report, certain=bool(split.odd))
        if disputed_by:
            self._updates.hear(disputed_by, step)
        else:
            self._updates.agreed()

    def before_update(self, step: int, *, skipped: bool) -> None:
        """Keep a piece of what is to be updated.

        step: the number of updates made so far. skipped: no update is made.
        """
        if not skipped:
            self._updates.keep(step)

    def updated(self, outcome: Outcome, change: Update) -> None:
        """Note the outcome of the vote, and have another rank repeat the piece; a collective where one was kept."""
        self._last = custody.outcome_digest(outcome, change)
        if not change.skipped:
            self._updates.exchange()


def begin(
    mesh: Mesh, model: nn.Module, optimizer: Optimizer, *, seed: int, start: int, port: Port, clock: Clock
) -> Checks | None:
    """Return the checks of a generation that begins at step `start`, None if there are none; a collective otherwise."""
    assignment = port.assignment
    if not assignment.at_rest:
        return None
    mine = json.dumps([assignment.node, port.device.described()]).encode()
    peers = [AuditedRank(node=node, device=name) for node, name in map(json.loads, mesh.gather(mine))]
    return Checks(mesh, optimizer, model=model, peers=peers, seed=seed, start=start, port=port, clock=clock)
