"""Rank all legal layouts of a cluster by predicted time."""

from __future__ import annotations

from elastic3d.planner.costs import Costs
from elastic3d.planner.layouts import legal_layouts
from elastic3d.planner.ranking import Candidate, Ranking
from elastic3d.values import Layout, ModelProfile


def rank(nodes: int, slots: int, profile: ModelProfile, request: Layout, costs: Costs) -> Ranking:
    """Return the layouts for up to `nodes` nodes of `slots` slots each, the fastest first.

    In `request`, pp, dp, tp, zero and replicas of 0 are free, and so is a schedule of None.
    """
    found = []
    flops = profile.first.flops + profile.blocks * profile.block.flops + profile.last.flops
    for used in range(1, nodes + 1):
        for layout in legal_layouts(used * slots, profile, request):
            rounds = -(-profile.micro_batches // layout.dp)
            seconds = 3 * flops * (rounds + layout.pp - 1) / (layout.pp * layout.tp * costs.device.flops)
            candidate = Candidate(
                layout=layout,
                nodes=used,
                spares=nodes - used,
                micro_batches=rounds,
                seconds=seconds,
                memory_bytes=0,
                time={"compute": seconds},
            )
            found.append(candidate)
    return Ranking(ranking=tuple(sorted(found, key=lambda c: (c.seconds, c.nodes, str(c.layout)))))
