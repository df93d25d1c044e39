"""How one rank takes part in the vote of a step: what it says, and what all together decided."""

from __future__ import annotations

from dataclasses import replace

from elastic3d.health.phases import Phase
from elastic3d.parallel.assembly import Assembly
from elastic3d.parallel.norms import RowSquares
from elastic3d.parallel.numerics.update import finite
from elastic3d.parallel.vote import Ballot, Outcome
from elastic3d.port import Port
from elastic3d.training.checking import Checks
from elastic3d.training.loss import Loss
from elastic3d.training.scalars import Scalars


def vote(
    assembly: Assembly,
    loss: Loss,
    port: Port,
    *,
    checks: Checks | None,
    scalars: Scalars,
    step: int,
    checkpoint: bool,
    unsaved: float,
    clip: bool,
    skip: bool,
    extras: float,
    measured: bool,
) -> Outcome:
    """Finish the gradient's reduction and vote on the step; a collective, with the same outcome on every rank.

    No rank has an outcome before all have made their backward passes and this one its sums. Where nothing of the
    gradient is voted on, the vote is on its way while the last pieces of it are; a rank that ends between its vote and
    its update is what it is after any vote: one without the step that the others have made, and whose state is taken
    from an older one. With a norm the vote cannot begin before the sums are there.

    checks: those of the generation, whose results are said with it; Convicted, on a rank whose state has changed.
    scalars: what the script says of the step. extras: the number of what it keeps of its own. step: the one that is
    voted on. checkpoint: one is due here. unsaved: seconds since the last one began. clip: the norm is wanted.
    measured: the squares of leaves are wanted, which the passes have measured, and the norm with them. skip: no update
    is to be made where the gradient is not finite. Samples are counted by the first rank of each replica alone, and
    losses by the first of each tensor or context group.
    """
    flags = port.flags()
    norm = clip or measured
    device, reads_gradient = assembly.mesh.computes_on, norm or skip
    # A device is given all there is to do before any of it is waited for; on the host, waiting is what there is to do.
    first = reads_gradient or assembly.mesh.device.type != "cpu"
    place = assembly.mesh.place
    leads = place.tp == 0 and place.cp == 0
    parts = loss.parts if leads else {}
    logged = scalars.tensors
    early = None if reads_gradient else device.begin_reading([*parts.values(), *logged])
    if first:
        assembly.reduction.finish()
    counts = place.pp == 0 and leads
    squares = assembly.squares.now() if norm else RowSquares()
    finites = [] if norm or not skip else finite(assembly.model)
    leaves = assembly.leaf_squares if measured else None
    sums = leaves.sums if leaves is not None else []
    reading = early or device.begin_reading([*parts.values(), *logged, *finites, *sums, squares.values])
    with assembly.mesh.device_awaited():
        read = iter(reading.wait())
    if checks is not None:
        checks.before_vote(step - 1)
    losses = {index: next(read).tolist() for index in parts}
    numbers = [float(next(read)) for _ in logged]
    sound = [bool(next(read)) for _ in finites]
    measures = [next(read) for _ in sums]
    ballot = Ballot(
        leave=flags.leave,
        etcd_away=flags.etcd_away,
        checkpoint=checkpoint,
        unsaved=unsaved,
        ready=flags.ready,
        finite=all(sound),
        held=port.held(),
        snapshot_needs=port.snapshot_needs(),
        losses={index: pair[0] for index, pair in losses.items()},
        tokens={index: pair[1] for index, pair in losses.items() if len(pair) > 1},
        samples=loss.batch.samples if counts else 0,
        sample_sum=loss.batch.sample_sum if counts else 0,
        excluded=loss.batch.excluded_samples if counts else 0,
        excluded_sum=loss.batch.excluded_sum if counts else 0,
        present=assembly.present(),
        rows=replace(squares, values=next(read)) if norm else squares,
        last=checks.last if checks is not None else 0.0,
        disputes=checks is not None and checks.disputes,
        extras=extras,
        row=port.progress.row(assembly.work()) if port.assignment.sheets else (),
        scalars=scalars.row(numbers),
        tells=scalars.tells,
        leaf_squares=leaves.placed(measures, loss.batch.count // assembly.plan.leaf) if leaves is not None else None,
    )
    paper = assembly.paper(loss.batch.count, sheets=port.assignment.sheets, scalars=scalars.columns)
    votes = assembly.mesh.begin_sum(paper.fill(port.assignment.rank, ballot, norm=norm, step=step))
    if not first:
        assembly.reduction.finish()
    port.progress.phase(Phase.VOTE)
    batch = loss.batch
    return paper.read(votes(), norm=norm, step=step, excluded=batch.excluded, sizes=batch.sizes)
