"""Draw histories by seed: the same seed is the same history, on any machine, forever."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.scenario import Fault, Join, Kill, When, node_name


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A cluster and what is done to it."""

    nodes: int
    slots: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.slots}: {', '.join(map(str, self.faults)) or 'nothing'}"


def draw(seed: int, steps: int) -> History:
    """Return a history of up to five nodes and four faults within `steps` steps, which some node survives."""
    chance = random.Random(seed)
    nodes, slots = chance.randint(1, 4), chance.choice((1, 1, 1, 2))
    joins = [Join(when=When(step=chance.randrange(1, steps))) for _ in range(chance.choice((0, 0, 1, 1, 2)))]
    # Only initial nodes are killed, and never all of them: a joiner may not have arrived when they die.
    kills: list[Kill] = []
    for number in chance.sample(range(nodes), chance.randint(0, nodes - 1)):
        # Sometimes in the middle of the recovery from the previous kill.
        if kills and chance.random() < 0.3:
            when = When(generation=1 + len(kills))
        elif kills and chance.random() < 0.3:
            when = kills[-1].when
        else:
            when = When(step=chance.randrange(1, steps))
        kills.append(Kill(node=node_name(number), when=when))
    faults: list[Fault] = [*kills, *joins]
    chance.shuffle(faults)
    return History(nodes=nodes, slots=slots, faults=tuple(faults))
