"""A schedule: the faults that one job meets, and whether they can happen to it at all."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chaos.faults.clock import ClockJump
from chaos.faults.code import RaisedByNewcomer
from chaos.faults.etcd import OUTAGES, EtcdEmpty, EtcdRestored
from chaos.faults.fault import NEWEST, Ends, Fault, Need, OfNode, Replay, node_name
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.faults.process import Continue, KillBelow, OfSlot, Stop
from chaos.faults.script import InScript, OfScript
from chaos.faults.store import StoreGone
from chaos.faults.store_disk import OfStoreDisk
from chaos.history.follow import Picture
from elastic3d.errors import UsageError

AT_MOST = 3
"""Generations that one fault leads to at most, if the job recovers from it."""

BROUGHT_ABOUT = ("peer.lost", "node.draining", "notice.heard", "etcd.lost", "etcd.impaired", "etcd.rolled_back")
"""Events that no job writes of which nodes and etcd are left alone, whatever its script does."""

_OF_GENERATIONS = ("peer.lost", "generation.sealed", "trainer.started", "state.restored", "step.committed")
"""Events of which there are more only where there is another generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Faults, in the order in which they were written. seed: what they were drawn from, None for none."""

    faults: tuple[Fault, ...]
    seed: int | None = None

    @property
    def inexact(self) -> tuple[Fault, ...]:
        """Those that last for real seconds, and so cannot be replayed exactly."""
        return tuple(fault for fault in self.faults if fault.ABOUT.replay is Replay.TIMED)

    def __str__(self) -> str:
        return ", ".join(map(str, self.faults)) or "nothing"


def check(faults: Sequence[Fault], *, nodes: int, steps: int | None = None, slots: int = 1) -> None:
    """Raise UsageError where `faults` contradict each other or cannot happen to a job. steps: None if unknown."""
    joins = sum(isinstance(fault, Join) for fault in faults)
    every = nodes + joins
    for fault in faults:
        fault.when.check(str(fault), steps)
        fault.check()
        if every < fault.LEAST_NODES:
            raise UsageError(f"{fault}: it takes {fault.LEAST_NODES} nodes or more, and the job has {every}")
        if isinstance(fault, OfNode):
            comes = any(1 in other.CHANGES for other in faults if other is not fault)
            _check_place(fault, every, slots, comes=comes)
        if isinstance(fault, InScript) and fault.rank >= every * slots:
            raise UsageError(f"{fault}: there is no such rank; the job has ranks 0 to {every * slots - 1} at most")
        most = 1 + AT_MOST * (len(faults) - 1)
        if fault.when.generation > most:
            raise UsageError(
                f"{fault}: generation {fault.when.generation} never comes; all else leads to {most} at most"
            )
    if faults and all(fault.when.generation > 1 or fault.when.event in BROUGHT_ABOUT for fault in faults):
        raise UsageError(f"{faults[0]}: its moment never comes, since nothing else in the schedule leads to it")
    _check_nodes(faults, nodes)
    for first, second in _pairs(faults):
        same = first.when == second.when
        for one, other in ((first, second), (second, first)):
            if Need.CERTIFICATES in one.ABOUT.needs and isinstance(other, ClockJump):
                raise UsageError(
                    f"{one} and {other}: by a clock that is wrong a new certificate is not valid yet, or over"
                )
        of_one = isinstance(first, _OF_ONE) or isinstance(second, _OF_ONE)
        if of_one and Need.MEMBERS in first.ABOUT.needs | second.ABOUT.needs:
            raise UsageError(f"{first} and {second}: one is of an etcd of one member, one of an etcd of three")
        if of_one and Need.PASSWORD in first.ABOUT.needs | second.ABOUT.needs:
            raise UsageError(f"{first} and {second}: an etcd whose data are replaced has another password")
        if same and first == second and not isinstance(first, Join):
            raise UsageError(f"{first}: it is there twice")
        if isinstance(first, OfScript) and isinstance(second, OfScript) and first.when.step == second.when.step:
            raise UsageError(f"{first} and {second}: the script fails once in a step; give them different steps")
        folder = isinstance(first, _OF_FOLDER) or isinstance(second, _OF_FOLDER)
        if folder and Need.S3 in first.ABOUT.needs | second.ABOUT.needs:
            raise UsageError(f"{first} and {second}: one is of a store in a folder, one of an object store")
        if isinstance(first, _OF_FOLDER) and isinstance(second, _OF_FOLDER) and type(first) is not type(second):
            raise UsageError(f"{first} and {second}: a folder that is gone can be nothing else; give one of the two")
        if same and isinstance(first, OUTAGES) and isinstance(second, OUTAGES):
            raise UsageError(f"{first} and {second}: etcd is away already; give them different moments")
    _check_end(faults, nodes)
    leaving = [fault for fault in faults if fault.CHANGES == (-1,)]
    if len(leaving) >= every + sum(isinstance(fault, Continue) for fault in faults):
        raise UsageError(f"{len(leaving)} losses leave none of {every} nodes; leave at least one")


def may_be_why(missing: Sequence[Fault], fault: Fault, picture: Picture) -> bool:
    """Return whether a fault's moment may not have come in `picture` since others were not made.

    All that it lacked has to be what one of those may lead to: a generation, where any can follow, or an event.
    """
    when = fault.when
    again = [one for one in missing if one.CHANGES or one.ABOUT.ends is not Ends.NOTHING]
    lacks: list[bool] = []
    if when.step > picture.step:
        lacks.append(False)
    if when.generation and not When(generation=when.generation, phase=when.phase).come(picture):
        lacks.append(any(one.when.generation < when.generation for one in again))
    if when.event and not When(event=when.event, count=when.count).come(picture):
        lacks.append(bool(again if when.event in _OF_GENERATIONS else missing))
    return bool(lacks) and all(lacks)


def bounds(faults: Sequence[Fault], nodes: int) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes for --nnodes, so that every fault finds its place.

    What waits for a generation or an event may come before or after anything else.
    """
    lowest = min(_counts(faults, nodes, late=lambda fault: -1 not in fault.CHANGES))
    highest = max(_counts(faults, nodes, late=lambda fault: -1 in fault.CHANGES))
    if any(isinstance(fault, KillBelow) for fault in faults):
        return KillBelow.MINIMUM, max(KillBelow.MINIMUM, highest)
    return max(1, min(2, lowest)), highest


def _counts(faults: Sequence[Fault], nodes: int, *, late: Callable[[Fault], bool]) -> Iterator[int]:
    """Yield how many nodes there are, one fault after the other. late: of which the moment is no step, come last."""

    def moment(fault: Fault) -> tuple[float, bool]:
        when = fault.when.step or (math.inf if late(fault) else 0)
        # At one step losses come before joins: a new node takes the place of a dead one.
        return when, -1 not in fault.CHANGES

    yield nodes
    for fault in sorted(faults, key=moment):
        for change in fault.CHANGES:
            nodes += change
            yield nodes


_OF_ONE = (EtcdEmpty, EtcdRestored)
_OF_FOLDER = (StoreGone, OfStoreDisk)


def _check_place(fault: OfNode, nodes: int, slots: int, *, comes: bool) -> None:
    """Refuse nodes, ranks and slots that the job has not. comes: whether another fault has a node join."""
    number = re.sub(r"\D", "", fault.node)
    if fault.node.startswith("node") and int(number) >= nodes:
        raise UsageError(f"{fault}: there is no such node; the job has node0 to {node_name(nodes - 1)}")
    if fault.node == NEWEST and not comes:
        raise UsageError(f"{fault}: nobody joins, so nobody is the newest; give a join as well, or name the node")
    if fault.node.startswith("rank") and int(number) >= nodes * slots:
        raise UsageError(f"{fault}: there is no such rank; the job has ranks 0 to {nodes * slots - 1} at most")
    if not isinstance(fault, OfSlot):
        return
    # What needs a second slot is not refused without one, but skipped.
    skipped = Need.SLOTS in fault.ABOUT.needs and slots < 2
    if fault.slot >= slots and not skipped:
        raise UsageError(f"{fault}: there is no slot {fault.slot}; nodes have {slots}")


def _check_nodes(faults: Sequence[Fault], nodes: int) -> None:
    """Refuse what happens to a named node that is not there then, as far as steps say what comes first."""
    named = [fault for fault in faults if isinstance(fault, OfNode) and fault.node.startswith("node")]
    leaving = [fault for fault in named if fault.CHANGES == (-1,)]
    if len(leaving) != len({fault.node for fault in leaving}):
        raise UsageError("a node can be killed, stopped or sent away only once")
    gone = {fault.node: fault for fault in leaving}
    arrivals = sorted((fault for fault in faults if isinstance(fault, Join)), key=lambda join: join.when.step)
    come = {node_name(nodes + number): join for number, join in enumerate(arrivals)}
    for fault in named:
        before = gone.get(fault.node)
        if isinstance(fault, Continue):
            if not isinstance(before, Stop):
                raise UsageError(f"{fault}: {fault.node} is not stopped")
            if later(before, fault, same=True):
                raise UsageError(f"{fault}: it must come after {before}")
        elif before is not None and before is not fault and later(fault, before):
            woken = [one for one in named if isinstance(one, Continue) and one.node == fault.node]
            if not woken or later(woken[0], fault, same=True):
                raise UsageError(f"{fault}: {fault.node} is gone by then, after {before}")
        if fault.node in come and later(come[fault.node], fault, same=True):
            raise UsageError(f"{fault}: {fault.node} has not come by then; it comes with {come[fault.node]}")


def _check_end(faults: Sequence[Fault], nodes: int) -> None:
    """Refuse what comes after the job's certain end, and what may keep it from ending so."""
    for end in (fault for fault in faults if fault.ABOUT.fatal):
        for fault in faults:
            if later(fault, end):
                raise UsageError(f"{fault}: its moment never comes, since the job ends by {end} before")
            if fault is not end and fault.ABOUT.fatal:
                raise UsageError(f"{fault} and {end}: the job ends by the one or by the other; give one of the two")
        others = [fault for fault in faults if fault is not end]
        if isinstance(end, KillBelow):
            _check_below(end, others, nodes)
    arrivals = [fault for fault in faults if isinstance(fault, Join)]
    for newcomer in (fault for fault in faults if isinstance(fault, RaisedByNewcomer)):
        if not arrivals:
            raise UsageError(f"{newcomer}: its moment never comes, since no node does; give a join as well")
        if all(later(newcomer, join) for join in arrivals):
            raise UsageError(
                f"{newcomer}: its moment never comes, since all who join do so before; give an earlier one"
            )


def _check_below(end: Fault, others: Sequence[Fault], nodes: int) -> None:
    """Refuse nodes that may come while the job waits for more, and losses that leave too few before."""
    for fault in others:
        if 1 in fault.CHANGES and not later(end, fault):
            raise UsageError(
                f"{fault} and {end}: a node that comes then may be enough; give {fault.WORD} an earlier step"
            )
    if min(_counts(others, nodes, late=lambda fault: -1 not in fault.CHANGES)) < KillBelow.MINIMUM:
        raise UsageError(f"{end}: too few nodes are left by then; at least {KillBelow.MINIMUM} must be")


def later(one: Fault, other: Fault, *, same: bool = False) -> bool:
    """Return whether one is at a later step than the other, with `same` also at the same; False if unknown."""
    if not (one.when.step and other.when.step):
        return False
    return one.when.step > other.when.step or (same and one.when.step == other.when.step)


def _pairs(faults: Sequence[Fault]) -> Iterator[tuple[Fault, Fault]]:
    for at, first in enumerate(faults):
        for second in faults[at + 1 :]:
            yield first, second
