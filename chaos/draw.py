"""Draw histories and schedules by seed: the same seed is the same one, on any machine, forever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.faults.catalogue import KINDS, kind_of
from chaos.faults.fault import Fault, node_name
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.faults.process import Continue, Kill
from chaos.schedule import Schedule, check
from elastic3d.errors import UsageError


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


def draw_schedule(
    seed: int, *, nodes: int, steps: int, faults: int, words: Sequence[str] = (), slots: int = 1
) -> Schedule:
    """Return a schedule of `faults` faults that can happen to a job of so many nodes and steps.

    words: of the catalogue, all by default. What is lost is lost once, and some node is left; UsageError where so many
    faults of these kinds cannot happen to this job.
    """
    kinds = [kind_of(word) for word in words] or [kind for kind in KINDS.values() if kind is not Continue]
    chance = random.Random(f"schedule {seed}")
    drawn: list[Fault] = []
    for _ in range(TRIES * faults):
        if len(drawn) == faults:
            break
        one = chance.choice(kinds).drawn(chance, nodes=nodes, steps=steps)
        try:
            check([*drawn, one], nodes=nodes, steps=steps, slots=slots)
        except UsageError:
            continue
        drawn.append(one)
    if len(drawn) < faults:
        raise UsageError(f"{faults} faults cannot happen to {nodes} nodes in {steps} steps; ask for {len(drawn)}")
    return Schedule(faults=tuple(sorted(drawn, key=lambda fault: fault.when.step)), seed=seed)


TRIES = 50
"""Faults that are drawn for each that is wanted, before it is given up."""
