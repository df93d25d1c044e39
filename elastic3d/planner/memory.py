"""Predict the memory of a layout's fullest device, by contributor: pure functions.

Model states follow Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054, section 3 and figure 1): parameters, gradients
and optimizer state over the shards of each stage; what FSDP2 and the reduction keep besides is taken from their code.
Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for what a block keeps, which is in the
profile, and Narayanan et al. 2021 (arXiv 2104.04473, section 2.2) and Qi et al. 2024 (arXiv 2401.10241) for how many
micro-batches of it a schedule keeps.
"""

from __future__ import annotations

from elastic3d.planner.extra_rounds import audited
from elastic3d.planner.loads import Load, held, parameters_of, telling
from elastic3d.planner.passing import passed_on
from elastic3d.planner.schedules import schedule_of
from elastic3d.values import KeptActivations, Layout, ModelPart, ModelProfile, Schedule

BUCKET = 256 << 20
"""Bytes of each buffer through which the reduction's pieces travel; a larger unit goes in parts."""


def memory(layout: Layout, profile: ModelProfile, reserve: int = 0) -> dict[str, int]:
    """Return the bytes on the fullest device by contributor, none of them 0. reserve: bytes lost from the start."""
    memories = [memory_of(load, layout, profile) for load in telling(layout, profile)]
    most = max(memories, key=lambda parts: sum(parts.values()))
    return {name: int(nbytes) for name, nbytes in (most | {"reserve": reserve}).items() if nbytes >= 1}


def memory_of(load: Load, layout: Layout, profile: ModelProfile) -> dict[str, float]:
    """Return the bytes of one pipeline rank by contributor."""
    rounds = profile.rounds(layout.dp, layout.shares) + audited(layout, profile)[0]
    return _states(load, layout, profile) | _activations(load, layout, profile, rounds)


def _states(load: Load, layout: Layout, profile: ModelProfile) -> dict[str, float]:
    """Return parameters, gradients, optimizer state and the reduction's buffers.

    ZeRO-1 and 2 keep gathered parameters beside their shards for the whole step, ZeRO-3 only those of the unit at work,
    of the next one, and of everything outside the blocks. The ordered reduction adds to the gradient's own shard each
    round (with replicas, to a part of it that is exchanged at the end, unless sums are passed on and never looked at).
    Beside the whole gradient of the unit at work
    there are two pairs of buffers, for that gradient laid flat and as the pieces of the others: as large as the largest
    unit in the dtype that is sent, and at most BUCKET each. With unequal shares there are so many that a whole turn is
    under way: twice the whole gradient. Whole gradients are kept by `fast` under ZeRO-1, for
    a step, and by the ordered reduction with leaves of several micro-batches, for a leaf; one replica has a second
    gradient then, of the leaves before. Where sequences are cut, each rank of a context group has a part of the sum
    over the chunks.
    """
    own, shards = held(load, profile, layout), layout.shards
    states = {"parameters": own * profile.held_bytes / shards, "optimizer": own * profile.optimizer_bytes / shards}
    if layout.dp * layout.cp == 1:
        apart = profile.chunks > 1 or 1 < profile.leaf < profile.micro_batches
        states["gradients"] = own * profile.gradient_bytes * (2 if apart else 1)
        states["gathered"] = own * profile.compute_bytes if profile.compute_bytes != profile.held_bytes else 0.0
        return states
    block = parameters_of(profile.block, layout.tp)
    rest = own - load.blocks * block
    gathered = min(own, 2 * block + rest) if layout.zero == 3 else own
    states["gathered"] = gathered * profile.compute_bytes
    ordered = profile.reduction == "ordered"
    states["gradients"] = own * profile.gradient_bytes / (1 if layout.zero == 1 and not ordered else shards)
    largest = max(block, rest)
    if not ordered:
        states["reduction"] = 2 * largest * profile.gradient_bytes
        return states
    if profile.leaf > 1:
        states["gradients"] += own * profile.gradient_bytes
    sent = sent_bytes(layout, profile)
    parts = layout.replicas > 1 and (not passed_on(layout) or profile.audit > 0)
    sums = own * profile.gradient_bytes / layout.dp if parts else 0.0
    lanes = 4 * min(largest * sent, BUCKET)
    if profile.chunks > 1:
        # Those of a micro-batch's chunks, which live for a micro-batch if there are several turns.
        sums = (own if profile.chunks > layout.cp else largest) * profile.gradient_bytes / layout.cp
        sums += 2 * min(largest * profile.compute_bytes, BUCKET)
    states["reduction"] = sums + largest * sent + (max(lanes, 2 * own * sent) if layout.shares else lanes)
    return states


def sent_bytes(layout: Layout, profile: ModelProfile) -> int:
    """Return the bytes of each number that the ordered reduction sends: as it was computed, or as it was added up."""
    added = profile.leaf > 1 or profile.chunks > 1 or (layout.schedule is not None and layout.schedule.splits_backward)
    return profile.gradient_bytes if added else min(profile.gradient_bytes, profile.compute_bytes)


def _activations(load: Load, layout: Layout, profile: ModelProfile, rounds: int) -> dict[str, float]:
    """Return the bytes that forwards keep for backwards, and the buffers in which torch's stages receive.

    torch makes a buffer for each micro-batch of a step and each stage that receives one, in both directions; all count
    with the shape of the run's first. Of
    sequences that are cut a rank keeps what its own chunks need, and the keys and values of all.
    """
    block = _kept(profile.block, layout.tp, profile.recompute) * load.blocks / layout.virtual
    first = _kept(profile.first, layout.tp, profile.recompute) if load.first else 0.0
    last = _kept(profile.last, layout.tp, profile.recompute) if load.last else 0.0
    chunks = in_flight(layout, load.rank, rounds)
    ends = chunks / layout.virtual
    schedule = schedule_of(layout)
    late = ends if schedule in (Schedule.GPIPE, Schedule.ZERO_BUBBLE) else min(2.0, ends)
    again = max(0.0, _kept(profile.block, layout.tp, "none") - _kept(profile.block, layout.tp, profile.recompute))
    receiving = (layout.virtual - load.first) + (layout.virtual - load.last) if layout.pp > 1 else 0
    cp = layout.cp
    # At most: with grouped queries they are smaller.
    reached = 2.0 * profile.boundary * load.blocks if profile.chunks > 1 else 0.0
    return {
        "activations": (block * chunks + first * ends) / cp,
        "keys and values": reached,
        "logits": last * (late if schedule is not None else 1.0) / cp,
        "receive buffers": float(receiving * rounds * profile.boundary),
        "workspace": max(*(part.workspace for part, _ in load.parts(profile)), again) / profile.chunks,
    }


def in_flight(layout: Layout, rank: int, rounds: int) -> int:
    """Return the most micro-batches whose activations a pipeline rank keeps, each of its stages counted."""
    pp, virtual = layout.pp, layout.virtual
    turn = rounds // max(1, rounds // pp)
    match schedule_of(layout):
        case None:
            return 1
        case Schedule.GPIPE:
            most = rounds
        case Schedule.ONE_F_ONE_B:
            most = pp - rank
        case Schedule.INTERLEAVED:
            most = (virtual - 1) * turn + 2 * (pp - 1 - rank) + 1
        case Schedule.ZERO_BUBBLE:
            most = (virtual - 1) * turn + pp
        case Schedule.ZBV:
            most = 2 * pp
        case Schedule.DUALPIPE_V:
            most = 2 * pp + 1
    return min(most, rounds * virtual)


def kept_by(part: ModelPart, kind: str) -> KeptActivations:
    """Return what a part keeps; if that kind was not measured, what it keeps without recomputation."""
    return part.kept.get(kind) or part.kept.get("none") or KeptActivations()


def _kept(part: ModelPart, tp: int, kind: str) -> float:
    kept = kept_by(part, kind)
    return kept.whole + kept.cut / tp
