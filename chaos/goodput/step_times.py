"""The production planner's layouts and their predicted steps, each planned once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic3d.errors import LayoutError
from elastic3d.membership.records import MemberRecord
from elastic3d.planner import Candidate, Costs, Plan, plan, rank
from elastic3d.planner.enumeration import Cluster
from elastic3d.planner.ranking import judge
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Layout, ModelProfile


class Fastest:
    """The shortest step that is known for each number of nodes, whoever learned of it."""

    def __init__(self) -> None:
        self._by_nodes: dict[int, float] = {}

    def learn(self, nodes: int, seconds: float) -> None:
        """A step of a layout of so many nodes takes so long."""
        self._by_nodes[nodes] = min(seconds, self._by_nodes.get(nodes, seconds))

    def seconds(self, nodes: int) -> float | None:
        """Return the shortest step on at most so many nodes, None if no layout fits them."""
        return min((seconds for used, seconds in self._by_nodes.items() if used <= nodes), default=None)

    def used(self, nodes: int) -> int:
        """Return the fewest nodes on which such a step is made."""
        shortest = self.seconds(nodes)
        return min((used for used, seconds in self._by_nodes.items() if seconds == shortest), default=0)


class StepTimes:
    """Plans for one model on nodes that are alike. request: what of the layout is fixed."""

    def __init__(
        self, profile: ModelProfile, costs: Costs, slots: int, request: Layout, fastest: Fastest | None = None
    ) -> None:
        self.profile, self.costs, self.slots, self.request = profile, costs, slots, request
        self.fastest = fastest or Fastest()
        self._plans: dict[tuple[int, Layout | None, tuple[int, ...] | None], Plan | LayoutError] = {}
        self._seconds: dict[Layout, float] = {}
        self._best: dict[tuple[int, Layout], Candidate | None] = {}

    @property
    def state_bytes(self) -> int:
        """Bytes of the whole state, which a checkpoint holds."""
        return self.profile.parameters * (self.profile.held_bytes + self.profile.optimizer_bytes)

    def plan(self, nodes: int, present: Layout | None = None, counts: Collection[int] | None = None) -> Plan:
        """Return what a leader plans for so many nodes; LayoutError if no layout fits."""
        key = nodes, present, None if counts is None else tuple(counts)
        if key not in self._plans:
            try:
                self._plans[key] = plan(
                    nodes, self.slots, self.profile, self.request, previous=present, costs=self.costs, counts=counts
                )
            except LayoutError as error:
                self._plans[key] = error
        made = self._plans[key]
        if isinstance(made, LayoutError):
            raise made
        self.seconds(made.layout)
        return made

    def planner(
        self,
        nodes: int,
        record: MemberRecord,
        present: Layout | None,
        speeds: Sequence[float] = (),
        bound: MemoryBound | None = None,
        counts: Collection[int] | None = None,
        /,
    ) -> Plan:
        """Plan as the membership machine asks for it; nodes here are alike, and memory suffices as predicted."""
        assert not speeds
        assert bound is None
        return self.plan(nodes, present, counts)

    def seconds(self, layout: Layout) -> float:
        """Return the predicted seconds of a step of a layout that fits."""
        if layout not in self._seconds:
            nodes = layout.world // self.slots
            judged = judge(layout, Cluster(nodes=nodes, slots=self.slots), self.profile, self.costs)
            assert isinstance(judged, Candidate), judged
            self._seconds[layout] = judged.seconds
            self.fastest.learn(nodes, judged.seconds)
        return self._seconds[layout]

    def best(self, nodes: int, request: Layout | None = None) -> Candidate | None:
        """Return the best layout on up to so many nodes, whatever was used before; None if none fits."""
        key = nodes, request or self.request
        if key not in self._best:
            ranking = rank(nodes, self.slots, self.profile, key[1], self.costs).ranking
            self._best[key] = ranking[0] if ranking else None
            for one in ranking[:1]:
                self.fastest.learn(one.nodes, one.seconds)
        return self._best[key]

    def fewest(self, most: int) -> int:
        """Return the fewest nodes that any layout fits, at most `most`; LayoutError, saying why, if none does."""
        for nodes in range(1, most + 1):
            if self.best(nodes) is not None:
                return nodes
        self.plan(most)
        raise AssertionError("a planner that finds no layout says why")
