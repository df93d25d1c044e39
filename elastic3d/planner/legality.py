"""Which layouts a model can be trained in at all, whatever they cost: pure.

Whatever is refused here is refused again, by the same names, where a model is taken: a user may ask for any layout.
"""

from __future__ import annotations

from elastic3d.planner.schedules import every_count, problem
from elastic3d.values import Layout, ModelProfile, Schedule


def unfit(layout: Layout, profile: ModelProfile) -> str | None:
    """Return why a layout cannot train the model of a profile, and what would; None if it can."""
    if layout.tp > 1 and not profile.heads:
        return f"tp={layout.tp} needs a model with a tensor-parallel plan; pass one as tensor="
    if layout.tp > 1 and profile.heads % layout.tp:
        return f"tp={layout.tp} does not divide the model's {profile.heads} heads"
    if why := uncut(layout, profile.chunks, profile.recompute):
        return why
    if layout.dp > profile.leaves:
        whole = f" leaves of {profile.leaf} micro-batches" if profile.leaf > 1 else " micro-batches"
        return f"dp={layout.dp} leaves ranks without one of the {profile.leaves}{whole}"
    if profile.recompute == "selective" and layout.schedule is not None and layout.schedule.splits_backward:
        return f'schedule={layout.schedule.value} splits the backward pass, which recompute="selective" cannot follow'
    if profile.tied and layout.pp > 1:
        return (
            f"pp={layout.pp} would part a parameter that the model's first and last part share: use pp=1, or untie it"
        )
    if profile.unstaged and layout.pp > 1:
        return (
            f"pp={layout.pp} passes on activations, and collate= or a TokenBudget may make micro-batches of several "
            f"shapes: use pp=1. {profile.unstaged}"
        )
    if profile.compress == "powersgd" and layout.dp > 1 and layout.replicas == 1:
        return f'dp={layout.dp} has one replica, and compress="powersgd" compresses what replicas exchange'
    if layout.shares and (why := unshared(layout, profile.reduction, bool(profile.experts), profile.fewest)):
        return f"shares={'/'.join(map(str, layout.shares))} {why}"
    counts = profile.counts or (profile.micro_batches,)
    multiple = profile.multiple
    problems = (
        problem(layout, blocks=profile.blocks, micro_batches=count, leaf=profile.leaf, multiple=multiple)
        for count in every_count(layout, counts, multiple)
    )
    return next(filter(None, problems), None) or _experts(layout, profile, counts)


def uncut(layout: Layout, chunks: int, recompute: str) -> str | None:
    """Return why a layout cannot compute sequences cut into so many chunks, and what would; None if it can."""
    if chunks == 1:
        if layout.cp == 1:
            return None
        return f"cp={layout.cp} needs sequences that are cut: give run.shard(..., chunks={layout.cp}), or a multiple"
    if chunks % layout.cp:
        return f"cp={layout.cp} does not divide the {chunks} chunks of run.shard(..., chunks={chunks})"
    for there, what, instead in (
        (layout.pp > 1, f"pp={layout.pp}", "pp=1"),
        (layout.tp > 1, f"tp={layout.tp}", "tp=1"),
        (layout.replicas > 1, f"replicas={layout.replicas}", "replicas=1"),
        (bool(layout.shares), f"shares={'/'.join(map(str, layout.shares))}", "none"),
        (recompute == "selective", 'recompute="selective"', '"full"'),
    ):
        if there:
            return f"{what} does not go with sequences that are cut (chunks={chunks}): use {instead}"
    return None


def unshared(layout: Layout, reduction: str, experts: bool, leaves: int) -> str | None:
    """Return why data-parallel ranks cannot have unequal shares of a step's leaves, after "shares"; None if they can.

    leaves: the smallest number that a step has.
    """
    if reduction != "ordered":
        return 'need reduction="ordered": the backend\'s own has every rank send in every round'
    if experts:
        return "do not go with experts=, which all data-parallel ranks compute together in every round"
    if leaves < layout.dp:
        return f"need a leaf for each of dp={layout.dp} ranks in every step, and some have {leaves}"
    return None


def _experts(layout: Layout, profile: ModelProfile, counts: tuple[int, ...]) -> str | None:
    if not profile.experts:
        return None
    if layout.tp > 1 or layout.replicas > 1:
        return f"experts= needs tp=1 and replicas=1; {layout} has {layout.tp} and {layout.replicas}"
    if layout.schedule not in (None, Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        return f"schedule={layout.schedule.value} does not go with experts=; gpipe and 1f1b do"
    shared = "micro-batches" if profile.leaf == 1 else f"leaves of {profile.leaf} micro-batches"
    for number, what in [(profile.experts, "experts"), *((count // profile.leaf, shared) for count in counts)]:
        if number % layout.dp:
            return f"dp={layout.dp} does not divide the {number} {what}, which experts= needs"
    return None
