"""Choose a layout for a number of nodes: a pure function, so that every trainer can verify it by computing it again.

This first planner knows no costs. It takes as many nodes as any legal layout can use, and among layouts of equal size
the one with the smallest pp + dp: a step's bubble grows with pp - 1 and its gradient exchange with dp - 1, so the
squarest mesh bounds both until measured costs can weigh them. On a tie the larger dp wins, whose pipeline is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.errors import LayoutError
from elastic3d.values import Layout, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A layout and how many nodes it uses; the others stay spares."""

    layout: Layout
    nodes: int


def legal_layouts(world: int, profile: ModelProfile, request: Layout) -> list[Layout]:
    """Return every layout of exactly `world` ranks that the model and the request allow, best first.

    Each stage needs a block; 1F1B needs at least pp rounds of micro-batches (a round is one micro-batch on each dp
    rank), and a dp rank without any micro-batch of its own would be a waste.
    """
    layouts = []
    for pp in range(1, world + 1):
        if world % pp or (request.pp and pp != request.pp):
            continue
        dp = world // pp
        if request.dp and dp != request.dp:
            continue
        rounds = -(-profile.micro_batches // dp)
        if pp <= profile.blocks and dp <= profile.micro_batches and rounds >= pp:
            layouts.append(Layout(pp=pp, dp=dp, tp=1, zero=request.zero))
    return sorted(layouts, key=lambda layout: (layout.pp + layout.dp, -layout.dp))


def plan(nodes: int, slots: int, profile: ModelProfile, request: Layout) -> Plan:
    """Return the best plan for `nodes` nodes of `slots` slots each.

    Raises LayoutError, saying what would work, where no number of nodes up to `nodes` has a legal layout.
    """
    for used in range(nodes, 0, -1):
        layouts = legal_layouts(used * slots, profile, request)
        if layouts:
            return Plan(layout=layouts[0], nodes=used)
    asked = ", ".join(f"{axis}={getattr(request, axis)}" for axis in ("pp", "dp") if getattr(request, axis)) or "none"
    raise LayoutError(
        f"no layout fits {nodes} node(s) x {slots} slot(s) with {profile.blocks} blocks and {profile.micro_batches} "
        f"micro-batches per step (asked for: {asked}); pp may be at most the number of blocks and of micro-batch "
        "rounds, and pp x dp must be a whole number of nodes: free an axis, add nodes, or raise global_batch"
    )
