"""Schedules of which every fault surely finds its moment and its place, and whose promise is that the job goes on.

`check` refuses what can never happen. A person may still order what may not happen, or what nobody promises to survive;
what is drawn may not: a fault that was not made, or a state that was lost as promised, would say nothing of the job.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from chaos.faults.etcd import EtcdDeleted, EtcdEmpty, EtcdPause, EtcdRestart, EtcdRestored, Revoke
from chaos.faults.events import OfEvents
from chaos.faults.fault import Fault, OfNode, Place
from chaos.faults.memory import AllSnapshotFlips, SnapshotFlip
from chaos.faults.network import Cut, CutFromEtcd, OfCable, Reset
from chaos.faults.orders import Announce, Drain, Terminate
from chaos.faults.process import Flap, Freeze, Kill, KillCompanion, KillKeeper, KillTrainer, Pause, Slow, Stop
from chaos.faults.store import StoreFlips, StoreFlipsWrites, StoreGone
from chaos.schedules.schedule import later
from elastic3d.errors import UsageError
from elastic3d.values import Layout

ANY = Layout()
"""What a script asks for that leaves the layout free."""
SAVED = "checkpoint.committed"


def of_trainers(fault: Fault) -> bool:
    """Return whether it befalls a node's trainers, their connections or snapshots, which a spare node has not."""
    return isinstance(fault, KillTrainer | Freeze | Pause | Slow | Reset | SnapshotFlip)


def fewest_nodes(asked: Layout, slots: int = 1) -> int:
    """Return the fewest nodes of so many slots that a layout which is asked for takes; 0 if no number of them will do.

    It takes a multiple of them. What the model and its batches allow is not looked at.
    """
    inner = (asked.cp or 1) * (asked.tp or 1)
    if slots % inner:
        return 0
    ranks = inner * (asked.pp or 1) * (asked.dp or asked.replicas or 1)
    nodes = ranks // math.gcd(ranks, slots)
    return nodes if nodes * slots == ranks or not (asked.pp and asked.dp) else 0


def sure_ranks(nodes: int, slots: int = 1, asked: Layout = ANY) -> int:
    """Return how many of so many nodes any layout has ranks on: the most that are a power of two, or half of them.

    Nodes of several slots are more often spares: eight slots are no quicker with four micro-batches than six.
    """
    fewest = fewest_nodes(asked, slots) or 1
    times = 1 if asked.pp and asked.dp else max(1, nodes // fewest)
    return fewest * (1 << (times.bit_length() - 1) if slots == 1 else max(1, times // 2))


def begins_generation(fault: Fault, nodes: int, slots: int = 1, asked: Layout = ANY) -> bool:
    """Return whether another generation follows for certain: not where what goes may be a spare of so many nodes."""
    if slots > 1 or sure_ranks(nodes, slots, asked) < nodes:
        return isinstance(fault, KillTrainer)
    return isinstance(fault, Kill | KillKeeper | KillCompanion | KillTrainer | Flap | Drain | Terminate)


def saved_before(faults: Sequence[Fault], saved: int, last: int) -> list[Fault]:
    """Return the faults, all losses of memory but the first only once a checkpoint is committed.

    Two nodes may be all that hold a part of the state. saved: the step of the job's first checkpoint, 0 for none. A
    snapshot that is damaged may be the one of which the first checkpoint is made, so that it is none: of several losses
    such a one waits as well.
    """
    several = sum(map(takes_memory, faults)) > 1
    lost, made = False, []
    for fault in faults:
        if takes_memory(fault):
            if saved and (lost or (several and isinstance(fault, SnapshotFlip))):
                fault = dataclasses.replace(fault, when=dataclasses.replace(fault.when, event=SAVED))
            lost = True
        made.append(fault)
    return made


def takes_memory(fault: Fault) -> bool:
    """Return whether what a node holds is lost, without a word before.

    Damaged snapshots are, until the next ones: where whoever makes the faults is late, steps between two make no odds.
    """
    return isinstance(fault, Kill | KillKeeper | KillCompanion | Stop | Flap | Cut | CutFromEtcd | SnapshotFlip)


def check_sure(
    faults: Sequence[Fault], *, nodes: int, slots: int = 1, least: int = 1, asked: Layout = ANY, saved: bool = False
) -> None:
    """Raise UsageError where one of `faults` might not be made, or the job might rightly end by them.

    least: nodes that have to be left of those the job starts with; so must what the layout takes that is asked for.
    saved: whether it commits a checkpoint in time.
    """
    least = max(least, fewest_nodes(asked, slots))
    losses = [fault for fault in faults if -1 in fault.CHANGES]
    left = nodes - len(losses)
    if left < least:
        raise UsageError(f"{len(losses)} losses leave {left} of {nodes} nodes; {least} must be left")
    for fault in faults:
        _check_node(fault, faults)
        rank = fault.node if isinstance(fault, OfNode) and of_trainers(fault) else ""
        if rank.startswith("rank") and int(rank.removeprefix("rank")) // slots >= sure_ranks(left, slots, asked):
            raise UsageError(f"{fault}: with {left} nodes left there may be no such rank")
        if isinstance(fault, OfEvents) and sure_ranks(left, slots, asked) < fault.LEAST_NODES:
            raise UsageError(f"{fault}: of the {left} nodes left there may be none that neither leads nor is first")
        if isinstance(fault, Reset) and left < 2:
            raise UsageError(f"{fault}: one node that is left has nobody to be connected with")
    _check_memory(faults, saved)
    _check_outages(faults)
    _check_cables(faults)


def check_waits(faults: Sequence[Fault], saved: int) -> None:
    """Raise UsageError where a fault waits for the first checkpoint, of step `saved`, and another may delay that."""
    waits = [fault for fault in faults if fault.when.event == SAVED]
    for fault in faults if waits else ():
        if fault.ABOUT.place in (Place.STORE, Place.DISK) and fault.when.step < 2 * saved:
            raise UsageError(f"{waits[0]}: a checkpoint may come too late, after {fault}")


def _check_node(fault: Fault, faults: Sequence[Fault]) -> None:
    """Refuse what happens to a node that may be gone by then, or not be back yet."""
    if not isinstance(fault, OfNode):
        return
    named = fault.node.startswith("node")
    for loss in faults:
        if loss is fault or -1 not in loss.CHANGES or not isinstance(loss, OfNode) or later(loss, fault):
            continue
        # A leader seals the generation without itself before it leaves, and nobody says who leads from then on.
        if fault.node == "leader" and isinstance(loss, Drain | Terminate | Announce):
            raise UsageError(f"{fault}: nobody may know who leads after {loss}")
        # Nobody knows beforehand which node leads, or has rank 0.
        if named and (loss.node == fault.node or not loss.node.startswith("node")):
            raise UsageError(f"{fault}: {fault.node} may be gone by then, after {loss}")


def _check_memory(faults: Sequence[Fault], saved: bool) -> None:
    """Refuse losses of both copies of the state where no checkpoint can take their place."""
    lost = [fault for fault in faults if takes_memory(fault)]
    # Whoever takes all copies at once needs no second one, and the job may end by it where nothing is saved.
    every: list[Fault] = [fault for fault in faults if isinstance(fault, AllSnapshotFlips)]
    lost = every * 2 or lost
    if len(lost) < 2:
        return
    if not saved and lost[0] is not lost[1]:
        raise UsageError(f"{lost[0]} and {lost[1]}: they may be all that hold the state, before a checkpoint has it")
    for fault in faults:
        if isinstance(fault, StoreFlips | StoreFlipsWrites) or fault.ABOUT.detector == "checkpoint.failed":
            raise UsageError(f"{fault}: after {lost[0]} and {lost[1]} the state may have to come from the store")


def _check_outages(faults: Sequence[Fault]) -> None:
    """Refuse what waits for the end of an outage, which may be later than the job's."""
    outages = [fault for fault in faults if isinstance(fault, EtcdPause | EtcdRestart | EtcdRestored)]
    gone = [fault for fault in faults if isinstance(fault, StoreGone)]
    for several in (outages, gone):
        if len(several) > 1:
            raise UsageError(f"{several[0]} and {several[1]}: the one may last until the job ends before the other")
    for empty in (fault for fault in faults if isinstance(fault, EtcdDeleted | EtcdEmpty)):
        for fault in faults:
            if isinstance(fault, Revoke) and not later(empty, fault):
                raise UsageError(f"{fault}: the node may have no lease again before the job ends, after {empty}")
    for outage in outages:
        if isinstance(outage, EtcdRestored):
            continue
        for fault in faults:
            asks = fault.ABOUT.place is Place.ETCD or isinstance(fault, Drain)
            if fault is not outage and asks and not later(outage, fault):
                raise UsageError(f"{fault}: etcd may be away then, after {outage}")


def _check_cables(faults: Sequence[Fault]) -> None:
    """Refuse a second fault of what may be the same cable, for which the first one may not be over in time."""
    cables = [fault for fault in faults if isinstance(fault, OfCable | Cut)]
    for at, fault in enumerate(cables):
        for other in cables[:at]:
            if not (fault.node.startswith("node") and other.node.startswith("node")) or fault.node == other.node:
                raise UsageError(f"{other} and {fault}: they may be of one cable, at one time")
