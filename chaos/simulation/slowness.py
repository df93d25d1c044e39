"""Nodes that are slow, as those that train find it, and what may be done about them at most."""

from __future__ import annotations

import math
from collections import Counter

from chaos.simulation.world import World
from elastic3d.membership.machine.balance import CHEAPEST
from elastic3d.values import Cause, Generation

UNQUIET = 15.0
"""Seconds for which a change for slow nodes is waited for at the end, which comes whenever it pays."""


class SlowChecks:
    """What the checker knows of slow nodes. first: when each machine was slow first."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.first: dict[str, float] = {}
        self.changed_at = -math.inf
        self._changes: Counter[str] = Counter()

    def began(self, place: str) -> None:
        """Note that a machine is slow."""
        self.first.setdefault(place, self.world.loop.now)

    def sealed(self, before: Generation, formed: Generation) -> list[str]:
        """Return what is wrong with a change for the sake of slow nodes."""
        if formed.cause is not Cause.BALANCE:
            return []
        self.changed_at = self.world.loop.now
        wrong = []
        kept = {node.id for node in (*formed.nodes, *formed.spares)}
        if not {node.id for node in before.nodes} <= kept or len(formed.nodes) != len(before.nodes):
            wrong.append(f"{formed.key} was formed for slow nodes, and not of as many, or without one that was there")
        uses = {pace.place: pace.uses for pace in before.paces}
        concerned = [pace.place for pace in formed.paces if pace.uses > uses.get(pace.place, 0.0)]
        if not concerned:
            wrong.append(f"{formed.key} was formed for slow nodes, and its record counts it for none")
        for place in concerned:
            wrong += self._counted(formed, place)
        return wrong

    def _counted(self, formed: Generation, place: str) -> list[str]:
        """Each change costs twice what the one before it did, and comes once that much was lost."""
        if place not in self.first:
            return [f"{formed.key} was formed because {place} is slow, which it never was"]
        self._changes[place] += 1
        seconds = self.world.loop.now - self.first[place]
        most = math.log2(seconds / CHEAPEST + 1.0) + 1.0
        if self._changes[place] <= most:
            return []
        return [
            f"{formed.key} is change {self._changes[place]} for the sake of {place} within {seconds:.1f} s; its price "
            f"allows {most:.1f}"
        ]

    @property
    def busy(self) -> bool:
        """Whether a change was made lately, or is being prepared."""
        cores = [member.core for member in self.world.alive()]
        coming = any(core.view.coming is not None and core.view.coming.cause is Cause.BALANCE for core in cores)
        return coming or self.world.loop.now - self.changed_at < UNQUIET / 2
