"""How many bytes of gradients a layout sends between nodes: pure functions, as `parallel/reduction/ordered.py` sends.

Of what else ranks exchange no figure is given: how a backend gathers parameters between nodes is its own affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.planner.loads import held, loads
from elastic3d.planner.memory import sent_bytes
from elastic3d.planner.passing import passed_on
from elastic3d.values import Layout, ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTraffic:
    """Bytes that all ranks together send to ranks of other nodes, without what pads shards to one length.

    turn: in each turn of the reduction, for up to `turn_samples` samples. step: once a step besides. why: no figure can
    be given, and all are 0; "" otherwise.
    """

    turn: float = 0.0
    step: float = 0.0
    turn_samples: int = 0
    why: str = ""

    def of_step(self, samples: int) -> float:
        """Return the bytes of a step of so many samples."""
        turns = -(-samples // self.turn_samples) if self.turn_samples else 0
        return turns * self.turn + self.step


def gradient_traffic(layout: Layout, profile: ModelProfile, slots: int) -> GradientTraffic:
    """Return what a layout sends where each node has `slots` ranks, in the order of ranks."""
    dp, tp, shards = layout.dp, layout.tp, layout.shards
    if dp == 1:
        return GradientTraffic()
    for holds, why in (
        (profile.reduction != "ordered", "reduction='fast': the backend's own collectives decide what they send"),
        (bool(layout.shares), "the ranks of this layout have unequal shares"),
        (profile.experts > 0, "experts' gradients are not summed over all ranks"),
    ):
        if holds:
            return GradientTraffic(why=why)
    turn = step = 0.0
    gradient_bytes = profile.gradient_bytes
    for load in loads(layout, profile):
        own = held(load, profile, layout)
        for column in range(tp):
            nodes = [((load.rank * dp + row) * tp + column) // slots for row in range(dp)]
            here = Counter(nodes)
            if passed_on(layout):
                on = _passed(nodes, layout, own / shards * sent_bytes(layout, profile), own / shards * gradient_bytes)
                turn, step = turn + on.turn, step + on.step
                continue
            turn += own / dp * sent_bytes(layout, profile) * sum(dp - here[node] for node in nodes)
            if layout.replicas > 1:
                # Each rank has summed a part of one shard, which goes to all that hold the shard.
                holders = Counter((node, row % shards) for row, node in enumerate(nodes))
                away = (layout.replicas - holders[node, row // layout.replicas] for row, node in enumerate(nodes))
                step += own / dp * gradient_bytes * sum(away)
    return GradientTraffic(turn=turn, step=step, turn_samples=dp * profile.leaf * profile.micro_batch)


def _passed(nodes: Sequence[int], layout: Layout, piece: float, total: float) -> GradientTraffic:
    """Return what ranks of one place on pp and tp send where sums go from replica to replica.

    nodes: of each row. piece, total: bytes of one rank's part of a piece and of a sum. The last replica sends a whole
    sum to all others once a step, and in that turn none to the first.
    """
    shards, rows = layout.shards, len(nodes)
    within = on = wrapped = spread = 0.0
    for row, node in enumerate(nodes):
        copy = row // shards
        within += sum(node != other for other in nodes[copy * shards : (copy + 1) * shards])
        goes = node != nodes[(row + shards) % rows]
        on += goes
        if copy == layout.replicas - 1:
            wrapped += goes
            spread += sum(node != other for other in nodes[row % shards : rows - shards : shards])
    return GradientTraffic(turn=piece * within + total * on, step=total * (spread - wrapped))
