"""How one rank takes part in the vote of a step: what it says, and what all together decided."""

from __future__ import annotations

from elastic3d.health.phases import Phase
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.host_copy import on_host
from elastic3d.parallel.numerics.update import finite
from elastic3d.parallel.vote import Ballot, Outcome
from elastic3d.port import Port
from elastic3d.training.loss import Loss


def vote(assembly: Assembly, loss: Loss, port: Port, *, checkpoint: bool, clip: bool, skip: bool) -> Outcome:
    """Finish the gradient's reduction and vote on the step; a collective, with the same outcome on every rank.

    checkpoint: one is due here. clip: the norm is wanted. skip: no update is to be made where the gradient is not
    finite. Samples are counted by the first rank of each replica alone, and losses by the first of each tensor group.
    """
    flags = port.flags()
    assembly.reduction.finish()
    place = assembly.mesh.place
    counts = place.pp == 0 and place.tp == 0
    # Whatever a device has yet to compute for the vote is queued before any of it is waited for.
    squares = assembly.squares() if clip else {}
    finites = [] if clip or not skip else finite(assembly.model)
    parts = loss.parts if place.tp == 0 else {}
    read = iter(on_host([*parts.values(), *finites, *(rows for _, rows in squares.values())]))
    losses = {index: next(read).tolist() for index in parts}
    sound = [bool(next(read)) for _ in finites]
    ballot = Ballot(
        leave=flags.leave,
        etcd_away=flags.etcd_away,
        checkpoint=checkpoint,
        ready=flags.ready,
        finite=all(sound),
        held=port.held(),
        snapshot_needs=port.snapshot_needs(),
        losses={index: numbers[0] for index, numbers in losses.items()},
        tokens={index: numbers[1] for index, numbers in losses.items() if len(numbers) > 1},
        samples=loss.batch.samples if counts else 0,
        sample_sum=loss.batch.sample_sum if counts else 0,
        present=assembly.present(),
        rows={name: (first, next(read)) for name, (first, _) in squares.items()},
    )
    paper = assembly.paper(loss.batch.count)
    port.progress.phase(Phase.VOTE)
    votes = assembly.mesh.sum(paper.fill(port.assignment.rank, ballot, norm=clip))
    return paper.read(votes, norm=clip)
