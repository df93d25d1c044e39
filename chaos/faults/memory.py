"""Faults of memory: bits change in it, and it runs out."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.faults.fault import LONGEST, About, Ends, Fault, Need, OfNode, Place, Replay
from chaos.faults.live import LiveJob
from chaos.faults.script import InScript, about
from chaos.history.follow import Event
from chaos.machine.flips import flip
from chaos.machine.processes import Part, send
from elastic3d.errors import UsageError

_ROOM = 1 << 20
"""Most MiB that a node is left with: a TiB."""

_SHORT = "memory runs out on a rank, on a device or on the host, also where the kernel kills it for that"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest(InScript):
    """One bit of a rank's first parameter changes in its memory."""

    WORD = "rest"
    ABOUT = about(
        Place.MEMORY,
        "a write to the parameter",
        "its step is not made, and all go on from the newest snapshot",
        "a bit of a rank's parameters or optimizer state changes in its memory",
        "state.altered",
        5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Short(InScript):
    """A rank asks for more memory than the kernel lets it have."""

    WORD = "memory"
    ABOUT = about(
        Place.MEMORY,
        "the limit `RLIMIT_DATA` of the process",
        "the next generation needs less, with the same bits",
        _SHORT,
        "memory.short",
        5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShort(InScript):
    """A rank asks for more memory than its device has, in a forward pass, or in the backward one of an odd pass."""

    WORD = "devicememory"
    OPTIONS = ("--device=emulated",)
    ABOUT = about(
        Place.MEMORY,
        "torch.OutOfMemoryError, raised in a block on an emulated device",
        "the next generation needs less, with the same bits",
        _SHORT,
        "memory.short",
        5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze(OfNode):
    """A node gets `room` MiB of memory beside what its processes hold: from then on, or for `seconds` if not 0."""

    WORD = "squeeze"
    room: float = 16.0
    seconds: float = 0.0
    ABOUT = About(
        place=Place.MEMORY,
        enters="the limit of its control group, so that the kernel kills a trainer once more is needed",
        promised="the next generation needs less, with the same bits, as long as the script leaves one that does",
        row=_SHORT,
        detector="memory.short",
        needs=frozenset({Need.GROUP}),
        replay=Replay.TIMED,
        sure=False,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Set the limit; not yet while the kernel cannot take back the rest of what the node holds."""
        group = job.cluster.node(name).group
        if not group.limit(group.held() + int(self.room * (1 << 20))):
            return False
        job.note("squeeze", name)
        if self.seconds:
            job.later(self.seconds, lambda: group.limit(None))
        return True

    def check(self) -> None:
        """Refuse less than nothing, and what no machine has."""
        OfNode.check(self)
        if not (0 <= self.room <= _ROOM and 0 <= self.seconds <= LONGEST):
            raise UsageError(
                f"{self}: room= is from 0 to {_ROOM} MiB (a TiB), and seconds= from 0, for good, to {LONGEST:g} (a day)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFlip(OfNode):
    """A bit changes in every 4 KiB of the snapshots that a node holds, and the trainer of slot 0 is killed, which makes
    all read theirs."""

    WORD = "flip-snapshot"
    ABOUT = About(
        place=Place.MEMORY,
        enters="a write to the keepers' shared memory, then SIGKILL to a trainer",
        promised="the copies that other nodes hold are used, and the memory is mended with them; where there are none, "
        "an older state",
        row="a byte of a snapshot flips in a node's memory",
        detector="copy.damaged",
        bar=10.0,
        ends=Ends.GENERATION,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Change them; not yet while the node holds none."""
        node = job.cluster.node(name)
        trainers = node.processes(Part.TRAINERS)[:1]
        if not trainers or not sum(flip(pid) for pid in node.processes(Part.KEEPERS)):
            return False
        job.note("flip-snapshot", name)
        send(trainers, signal.SIGKILL)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class AllSnapshotFlips(Fault):
    """A bit changes in every 4 KiB of the snapshots that all nodes hold, and a trainer is killed: no copy is whole."""

    WORD = "flip-all-snapshots"
    ABOUT = About(
        place=Place.MEMORY,
        enters="a write to all keepers' shared memory while all trainers are stopped, then SIGKILL to one of them",
        promised="all go on from the newest checkpoint; where none was committed before, the job ends and says which "
        "step was lost",
        row="all copies are lost: no memory, no checkpoint",
        detector="copy.damaged",
        bar=10.0,
        ends=Ends.JOB,
        says=(r"step \d+ had been made and was held in memory, and nothing is left of it", "fresh=True"),
        unless="a checkpoint was committed before",
    )

    def make(self, job: LiveJob) -> bool:
        """Change them; not yet while there are none, or a node of the generation has no trainer."""
        view = job.picture.generation
        nodes = [node for node in job.cluster.nodes if node.alive and not node.stopped and not node.held]
        active = [node for node in nodes if view is not None and node.name in view.nodes]
        trainers = {node.name: node.processes(Part.TRAINERS) for node in active}
        if not active or not all(trainers.values()):
            return False
        every = [pid for pids in trainers.values() for pid in pids]
        # Meanwhile no step is made of which a whole snapshot would be left.
        send(every, signal.SIGSTOP)
        try:
            if not sum(flip(pid) for node in nodes for pid in node.processes(Part.KEEPERS)):
                return False
            job.note(self.WORD)
            send(every[:1], signal.SIGKILL)
        finally:
            send(every, signal.SIGCONT)
        return True

    def spared(self, events: Sequence[Event], at: float) -> bool:
        """Return whether there was a checkpoint then, or a whole state was read after it all the same."""
        saved = any(event.name == "checkpoint.committed" and event.at <= at for event in events)
        read = (event for event in events if event.name == "state.restored" and event.at > at)
        return saved or any(event.fields["source"] != "none" for event in read)

    def says(self, events: Sequence[Event], at: float) -> tuple[str, ...]:
        """Return as which step the lost one has to be named: one that was safe by then, or newer."""
        made = [event for event in events if event.name == "step.committed" and event.at <= at]
        safe = max((int(event.fields.get("safe_step", 0)) for event in made), default=0)
        # The newest may have been made just now, and be said afterwards.
        newest = max((int(event.fields["step"]) for event in made), default=0) + 1
        lost = "|".join(map(str, range(max(1, safe), newest + 1)))
        return (f"step ({lost}) had been made", *self.ABOUT.says)


KINDS = (Rest, Short, DeviceShort, Squeeze, SnapshotFlip, AllSnapshotFlips)
