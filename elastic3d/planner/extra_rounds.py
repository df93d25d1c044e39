"""Rounds of a step beyond its own, in which audits have micro-batches computed again: pure functions.

Interleaved schedules take rounds in turns of equal size: 4 and 5 may not do where 4 and 6 do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic3d.planner.schedules import every_count, problem
from elastic3d.values import Layout, ModelProfile, rounds

MOST_EXTRA = 64
"""Most extra leaves that are looked for; a schedule that allows none of them is never audited."""

RAREST = 1e12
"""Most steps from one audited one to the next, for budgets that are next to nothing: no run has so many."""


def extra_rounds(layout: Layout, *, blocks: int, counts: Sequence[int], leaf: int = 1) -> int | None:
    """Return the fewest rounds, one leaf at least, that every step may have beyond its own; None if there is no number.

    counts: every number of micro-batches that a step may have. leaf: how many are summed before they are sent.
    """
    return fewest(layout, blocks, [rounds(count, layout.dp, leaf) for count in counts], leaf)


def fewest(layout: Layout, blocks: int, own: Sequence[int], leaf: int) -> int | None:
    """Return the fewest rounds beyond each of these numbers that the schedule takes, None for none."""
    for extra in range(leaf, MOST_EXTRA * leaf + 1, leaf):
        grown = [(present + extra) * layout.dp for present in own]
        if not any(problem(layout, blocks=blocks, micro_batches=count, leaf=leaf) for count in grown):
            return extra
    return None


def interval(extra: int, budget: float, own: int) -> int:
    """Return in how many steps there may be one with `extra` rounds beyond its `own`, at a share `budget` of all."""
    return max(1, math.ceil(min(extra / (budget * own), RAREST) - 1e-9))


def audited(layout: Layout, profile: ModelProfile) -> tuple[int, int]:
    """Return the rounds of audited steps beyond their own, and in how many steps there is one: (0, 1) for no audits."""
    counts = every_count(layout, profile.counts or (profile.micro_batches,), profile.multiple)
    apart = profile.reduction == "ordered" and not profile.experts and profile.chunks == 1 and layout.dp > 1
    if not profile.audit or not apart or min(counts) < profile.leaf * layout.dp:
        return 0, 1
    extra = extra_rounds(layout, blocks=profile.blocks, counts=counts, leaf=profile.leaf)
    if extra is None:
        return 0, 1
    return extra, interval(extra, profile.audit, profile.rounds(layout.dp, layout.shares))
