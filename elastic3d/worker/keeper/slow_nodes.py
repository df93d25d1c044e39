"""Which nodes are slow, as this one's keeper finds from the steps of all: events, figures, and word to the membership.

Every keeper of the running generation hears the same steps and finds the same. The one with rank 0 tells people, once
in each generation in which a node is slow, so that what that costs can be accounted for in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic3d.health.options import Watching
from elastic3d.health.slow_node import SlowKind, SlowNode, SpeedFinding
from elastic3d.health.speeds import Speeds
from elastic3d.membership import events as m
from elastic3d.port import StepRecord
from elastic3d.values import Generation
from elastic3d.worker.pulse import Figures


class SlowNodes:
    """Called on the keeper's main thread. emit: for people; tell: for the membership. watching: None finds nothing."""

    def __init__(
        self,
        watching: Watching | None,
        *,
        emit: Callable[..., None],
        tell: Callable[[m.Event], None],
        figures: Figures,
    ) -> None:
        self._emit, self._tell, self._figures = emit, tell, figures
        self._speeds = Speeds(watching.slow) if watching is not None and watching.slow else None
        self._first = False
        self._generation = 0

    def begin(self, generation: Generation, *, first: bool) -> None:
        """Take note that this node's trainers run in another generation. first: rank 0 is among them."""
        self._first, self._generation = first, generation.number
        if self._speeds is not None and generation.layout is not None:
            nodes = [node.id for node in generation.node_of_rank]
            self._speeds.begin(generation.key, generation.layout, nodes, _known(generation))
            self._figures.slow(self._speeds.slow)

    def stepped(self, record: StepRecord) -> None:
        """Take note of a step."""
        if self._speeds is None or not record.sheets:
            return
        said = self._speeds.heard(record.step, record.sheets)
        if said is None:
            return
        self._figures.slow(said.slow)
        if self._first:
            for node in said.entered:
                self._emit("node.slow", **self._about(node, said))
            for node in said.left:
                self._emit("node.well", **self._about(node, said))
        slow = {id: node.slowness for id, node in said.slow.items()}
        self._tell(m.NodesSlow(key=said.key, step=said.step, slow=slow))

    def _about(self, node: SlowNode, said: SpeedFinding) -> dict[str, Any]:
        return {
            "nodes": [node.id.partition("@")[0]],
            "ranks": list(node.ranks),
            "rho": round(node.rho, 3),
            "kind": str(node.kind),
            "since": node.since,
            "step": said.step,
            "cost": round(node.cost, 4),
            "seconds": round(node.seconds, 3),
            "detail": node.detail,
            "generation": self._generation,
        }


def _known(generation: Generation) -> Iterator[SlowNode]:
    """Yield the nodes that are slow by the generation's record: who says it next may not have been there."""
    slow = {pace.place: pace for pace in generation.paces if pace.slow}
    for node in generation.nodes:
        if (pace := slow.get(node.place)) is not None:
            yield SlowNode(id=node.id, rho=pace.rho, kind=SlowKind(pace.kind), since=generation.reached)
