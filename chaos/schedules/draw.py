"""Draw histories and schedules by seed: the same seed is the same one, on any machine, forever."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from chaos.faults.catalogue import KINDS, kind_of
from chaos.faults.events import EventsFull, EventsGone, EventsHang
from chaos.faults.fault import Fault, Need, OfNode, node_name
from chaos.faults.frozen import FreezeAgent, FreezeCompanion, FreezeKeeper, FreezeTemplate
from chaos.faults.memory import AllSnapshotFlips, Squeeze
from chaos.faults.moment import When
from chaos.faults.network import CutFromEtcd, CutFromPeers, OneWay, Refuse, Strange
from chaos.faults.orders import Join, JoinOther, JoinUnfit, Late
from chaos.faults.process import Continue, Kill, KillBelow, KillLoader
from chaos.faults.script import OfScript
from chaos.faults.store import StoreStale, StoreStrips
from chaos.faults.store_disk import StoreDiskFull, StoreReadOnly
from chaos.schedules.schedule import Schedule, check
from chaos.schedules.sure import ANY, begins_generation, check_sure, check_waits, of_trainers, saved_before, sure_ranks
from elastic3d.errors import UsageError
from elastic3d.values import Layout


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


NAMED: Mapping[type[Fault], str] = MappingProxyType(
    {
        KillLoader: "only a script with `workers=` has such processes",
        FreezeKeeper: "what it leaves to the node is judged where it is alone",
        FreezeCompanion: "what it leaves to the node is judged where it is alone",
        FreezeTemplate: "what it leaves to the node is judged where it is alone",
        FreezeAgent: "its node cannot end by itself",
        EventsFull: "a node has to be there that neither leads nor has rank 0",
        EventsHang: "a node has to be there that neither leads nor has rank 0",
        EventsGone: "a node has to be there that neither leads nor has rank 0",
        StoreDiskFull: "a store has one place, a folder or a server",
        StoreReadOnly: "a store has one place, a folder or a server",
        StoreStale: "a small job lists nothing",
        KillBelow: "the job ends by it",
        AllSnapshotFlips: "the job ends by it where no checkpoint was committed before",
        StoreStrips: "nothing is promised of two leaders that write to such a store at once",
        Strange: "what it meets is the same in any job",
        JoinUnfit: "what it meets is the same in any job",
        JoinOther: "what it meets is the same in any job",
        Late: "it comes when nothing more happens to the job",
    }
)
"""Faults that are made only where they are named, and why."""

LASTING = (CutFromEtcd, CutFromPeers, OneWay, Refuse, Squeeze)
"""Faults that last as long as a small job, since what is promised needs that, or longer."""

ORDINARY: tuple[str, ...] = tuple(
    word
    for word, kind in KINDS.items()
    if Need.SCRIPT not in kind.ABOUT.needs and kind is not Continue and kind not in (*LASTING, *NAMED)
)
"""The words of what can happen to any script, and of which the same bits are promised.

Nobody is woken by chance, and nothing is lost for longer than many a job lasts.
"""


def draw_schedule(
    seed: int,
    *,
    nodes: int,
    steps: int,
    faults: int,
    words: Sequence[str] = (),
    slots: int = 1,
    least: int = 1,
    asked: Layout = ANY,
    saved: int = 0,
    also: Callable[[Sequence[Fault]], object] = lambda faults: None,
) -> Schedule:
    """Return a schedule of `faults` faults that surely happen to a job of so many nodes and steps.

    words: of the catalogue, by default the ORDINARY ones that nodes of so many slots can meet. least: nodes that are
    left. asked: the layout that the script asks for. saved: the step of the job's first checkpoint, 0 for none. also:
    raises UsageError for what else is not to be drawn. Some faults come together, or in the recovery from another.
    UsageError where so many faults of these kinds cannot happen to this job.
    """
    if not words:
        words = [word for word in ORDINARY if slots > 1 or Need.SLOTS not in KINDS[word].ABOUT.needs]
    kinds = [kind_of(word) for word in words]
    places = sorted({kind.ABOUT.place for kind in kinds})
    chance = random.Random(f"schedule {seed}")
    last = last_step(steps)
    sure = sure_ranks(nodes, slots, asked)

    def begins(one: Fault) -> bool:
        return begins_generation(one, nodes, slots, asked)

    drawn: list[Fault] = []
    for _ in range(TRIES * faults):
        if len(drawn) == faults:
            break
        # Each place as often as any other, however many ways there are to enter by it.
        place = chance.choice(places)
        kind = chance.choice([kind for kind in kinds if kind.ABOUT.place is place])
        one = _to_a_trainer(kind.drawn(chance, nodes=nodes, steps=last + 1), chance, slots, sure)
        one = _at_another_moment(one, drawn, chance, begins)
        some = saved_before([*drawn, one], saved, last)
        try:
            check(some, nodes=nodes, steps=steps, slots=slots)
            check_sure(some, nodes=nodes, slots=slots, least=least, asked=asked, saved=0 < saved <= last // 2)
            check_waits(some, saved)
            also(some)
        except UsageError:
            continue
        drawn = some
    if len(drawn) < faults:
        raise UsageError(f"{faults} faults cannot happen to {nodes} nodes in {steps} steps; ask for {len(drawn)}")
    ordered = sorted(drawn, key=lambda fault: (fault.when.generation, fault.when.step))
    return Schedule(faults=tuple(ordered), seed=seed)


def last_step(steps: int) -> int:
    """Return the last step of a job at which something may happen to it and still be noticed before its end."""
    return max(1, steps - max(2, steps // 8))


def _to_a_trainer(fault: Fault, chance: random.Random, slots: int, sure: int) -> Fault:
    """Return what befalls trainers by a rank, which has one: a node that the layout does not use has none."""
    if not (of_trainers(fault) and isinstance(fault, OfNode)):
        return fault
    return dataclasses.replace(fault, node=f"rank{slots * chance.randrange(sure)}")


def _at_another_moment(
    fault: Fault, drawn: Sequence[Fault], chance: random.Random, begins: Callable[[Fault], bool]
) -> Fault:
    """Return the fault, now and then at the moment of one before it, or in the recovery from one."""
    luck = chance.random()
    if isinstance(fault, OfScript | Continue) or not drawn:
        return fault
    if luck < TOGETHER:
        return dataclasses.replace(fault, when=drawn[-1].when)
    if luck < TOGETHER + RECOVERING and any(one.when.step and begins(one) for one in drawn):
        return dataclasses.replace(fault, when=When(generation=2))
    return fault


TRIES = 50
"""Faults that are drawn for each that is wanted, before it is given up."""
TOGETHER, RECOVERING = 0.15, 0.15
"""How often a fault comes at the moment of the one before it, and in a recovery."""
