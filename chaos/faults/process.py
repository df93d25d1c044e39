"""Faults of a node's processes: they die, stand still, or get less of a processor."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Self

from chaos.faults.code import STUCK
from chaos.faults.data import SLOW
from chaos.faults.fault import About, Ends, Fault, Need, OfNode, Place, Replay, check_seconds
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.machine.hogs import hogs
from chaos.machine.processes import Part, send
from chaos.machine.throttle import Throttle
from elastic3d.errors import UsageError

_DEATH = "the survivors form a generation without it at once; at most the steps since the newest snapshot again"
CROWDED = 64
"""Most processes for each processor that compute beside a job."""

_TRAINER = "the same nodes go on with fresh trainers; at most the steps since the newest snapshot again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(OfNode):
    """SIGKILL to a node's agent; the whole node goes with it."""

    WORD = "kill"
    CHANGES = (-1,)
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the agent",
        promised=_DEATH,
        row="a node dies, or one of its keepers",
        detector="peer.lost",
        bar=5.0,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Kill it."""
        job.note("kill", name)
        job.cluster.kill_node(name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class KillBelow(Fault):
    """SIGKILL to the agents of all nodes but one, fewer than the minimum of two, for longer than `timeout` seconds."""

    WORD = "kill-below"
    LEAST_NODES = 2
    MINIMUM: ClassVar[int] = 2
    """What `--nnodes` says of a job to which it happens."""
    timeout: float = 30.0
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the agents, in a job with `--nnodes=2:` and that `--rdzv-conf=timeout=`",
        promised="the job ends once the time is over and says so; checkpoints stay",
        row="fewer nodes than the minimum for longer than the timeout",
        detector="peer.lost",
        bar=5.0,
        replay=Replay.TIMED,
        ends=Ends.JOB,
        says=(r"1 node\(s\) for [\d.]+ s, the minimum is 2", "start more nodes, lower --nnodes, or raise"),
    )

    def make(self, job: LiveJob) -> bool:
        """Kill them, whoever came meanwhile included; not before a generation says who there is."""
        view = job.picture.generation
        there = [node.name for node in job.cluster.nodes if node.alive and not node.held]
        stays = [name for name in view.nodes if name in there] if view is not None else []
        if len(stays) < self.MINIMUM:
            return False
        job.note(self.WORD)
        for name in there:
            if name != stays[-1]:
                job.note("kill", name)
                job.cluster.kill_node(name)
        return True

    def conf(self) -> Mapping[str, str]:
        """Return the time that the job waits for more nodes."""
        return {"timeout": f"{self.timeout:g}"}

    def check(self) -> None:
        """Refuse a time that is none."""
        check_seconds(self, self.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfSlot(OfNode):
    """Something that happens to a process on slot `slot` of a node, from LEAST_SLOT up."""

    LEAST_SLOT: ClassVar[int] = 0
    slot: int = 0

    def check(self) -> None:
        """Refuse a slot below the first one."""
        OfNode.check(self)
        if self.slot < self.LEAST_SLOT:
            raise UsageError(f"{self}: slot={self.slot} is none that it happens to; give {self.LEAST_SLOT} or more")


def signal_one(what: str, number: signal.Signals, part: Part, slot: int, job: LiveJob, name: str) -> bool:
    """Send a signal to a process of a node, and note what that does; return False where there is none yet."""
    pids = job.cluster.node(name).processes(part)[slot : slot + 1]
    if pids:
        job.note(what, name)
        if number is signal.SIGSTOP:
            job.cluster.node(name).frozen.update(pids)
        send(pids, number)
    return bool(pids)


def _kill(fault: OfNode, part: Part, slot: int, job: LiveJob, name: str) -> bool:
    """Kill a process of a node; return False where there is none yet."""
    killed = signal_one(f"{part} killed", signal.SIGKILL, part, slot, job, name)
    if killed:
        # The agent of a node that goes with it ends with an error.
        job.cluster.node(name).killed = bool(fault.CHANGES)
    return killed


@dataclass(frozen=True, slots=True, kw_only=True)
class _KillPart(OfSlot):
    """SIGKILL to one process of a kind, on a slot of a node."""

    PART: ClassVar[Part]

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Kill it; not yet where there is none."""
        return _kill(self, self.PART, self.slot, job, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTrainer(_KillPart):
    """SIGKILL to a trainer."""

    WORD = "kill-trainer"
    PART = Part.TRAINERS
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the trainer of a slot",
        promised=_TRAINER,
        row="a trainer or its template dies",
        detector="trainer.exited",
        bar=5.0,
        ends=Ends.GENERATION,
        again=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTemplate(_KillPart):
    """SIGKILL to the process that forks trainers."""

    WORD = "kill-template"
    PART = Part.TEMPLATES
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the template of a slot",
        promised=_TRAINER,
        row="a trainer or its template dies",
        detector="trainer.exited",
        bar=5.0,
        ends=Ends.GENERATION,
        again=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KillKeeper(OfNode):
    """SIGKILL to a node's first keeper."""

    WORD = "kill-keeper"
    CHANGES = (-1,)
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the keeper of slot 0",
        promised=_DEATH,
        row="a node dies, or one of its keepers",
        detector="peer.lost",
        bar=5.0,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Kill it; not yet where there is none."""
        return _kill(self, Part.KEEPERS, 0, job, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillCompanion(_KillPart):
    """SIGKILL to a keeper that is not its node's first."""

    WORD = "kill-companion"
    CHANGES = (-1,)
    PART = Part.KEEPERS
    LEAST_SLOT = 1
    slot: int = 1
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the keeper of another slot than 0",
        promised=_DEATH,
        row="a node dies, or one of its keepers",
        detector="slot.failed",
        bar=5.0,
        needs=frozenset({Need.SLOTS}),
        again=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KillLoader(_KillPart):
    """SIGKILL to a process in which a trainer loads its data; `slot` counts those of the node."""

    WORD = "kill-loader"
    PART = Part.LOADERS
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to a worker of the data loader, in a script with `workers=`",
        promised=_TRAINER,
        row="a process of a trainer's data loader is killed",
        detector="trainer.exited",
        bar=10.0,
        ends=Ends.GENERATION,
        again=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(OfNode):
    """SIGSTOP to all processes of a node; `cont` wakes them, else they are killed at the end."""

    WORD = "stop"
    CHANGES = (-1,)
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to all processes of the node",
        promised="its neighbours miss it and agree, then as for a death",
        row="a node falls silent: all its processes stop, or its network is cut",
        detector="generation.sealed",
        bar=10.0,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it."""
        job.note("stop", name)
        job.cluster.stop_node(name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue(OfNode):
    """SIGCONT to all processes of a stopped node."""

    WORD = "cont"
    CHANGES = (1,)
    FIXED = True
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGCONT to all processes of the node",
        promised="it finds itself fenced, and joins as a newcomer",
        row="a node that was put out wakes up",
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Wake it; not while it is not stopped: whoever is to stop it may come later."""
        if not job.cluster.node(name).stopped:
            return False
        job.note("cont", name)
        job.cluster.wake_node(name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(OfSlot):
    """SIGSTOP to the trainer of a slot, for good."""

    WORD = "freeze"
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the trainer of a slot",
        promised="it is named, and the same nodes go on with fresh trainers",
        row=STUCK,
        detector="rank.stuck",
        bar=5.0,
        ends=Ends.GENERATION,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it; not yet where there is none."""
        return signal_one("trainer stopped", signal.SIGSTOP, Part.TRAINERS, self.slot, job, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(OfNode):
    """SIGSTOP to one kind of a node's processes, and SIGCONT `seconds` later."""

    WORD = "pause"
    part: Part = Part.TRAINERS
    seconds: float = 1.0
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the agent, the keepers, the templates or the trainers of the node, then SIGCONT",
        promised="the same bits; below the deadlines nobody is named and nothing is done",
        row="a node falls silent: all its processes stop, or its network is cut",
        replay=Replay.TIMED,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop them; not yet where there are none."""
        pids = job.cluster.node(name).processes(self.part)
        if pids:
            job.note(f"{self.part} paused", name)
            send(pids, signal.SIGSTOP)
            # Who is stopped for good, since before or meanwhile, stays so.
            frozen = job.cluster.node(name).frozen
            job.later(self.seconds, lambda: send([pid for pid in pids if pid not in frozen], signal.SIGCONT))
        return bool(pids)

    def check(self) -> None:
        """Refuse a time that is none."""
        OfNode.check(self)
        check_seconds(self, self.seconds)

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one that is too short for anybody to act."""
        node, when = f"node{chance.randrange(nodes)}", When(step=chance.randrange(1, steps))
        part, seconds = chance.choice((Part.KEEPERS, Part.TRAINERS)), chance.randint(1, 6) / 10
        return cls(node=node, when=when, part=part, seconds=seconds)

    def __str__(self) -> str:
        return f"pause the {self.part} of {self.node} for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flap(OfNode):
    """SIGKILL to a node, and the same node is started anew at once."""

    WORD = "flap"
    CHANGES = (-1, 1)
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGKILL to the agent, and a new agent of that name",
        promised="as for a death, and it joins again; a machine that is lost again and again is kept out",
        row="a machine is lost again and again",
        detector="peer.lost",
        bar=5.0,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Kill it and start it."""
        job.note("kill", name)
        job.cluster.kill_node(name)
        job.note("start", name)
        job.start(name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(OfNode):
    """A node has `share` of one processor from then on."""

    WORD = "throttle"
    share: float = 0.4
    ABOUT = About(
        place=Place.PROCESS,
        enters="the quota of its control group; without root, SIGSTOP and SIGCONT to its trainers by turns",
        promised="it is named with what it costs; what is done about it changes no bit",
        row=SLOW,
        detector="node.slow",
        bar=40.0,
        sure=False,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Slow it down."""
        job.note("throttle", name)
        node = job.cluster.node(name)
        if node.group.quota(self.share):
            job.at_end(lambda: node.group.quota(None))
            return True
        throttle = Throttle(lambda: node.processes(Part.TRAINERS), self.share)
        job.at_end(throttle.close)
        return True

    def check(self) -> None:
        """Refuse a share that is none."""
        OfNode.check(self)
        if not 0 < self.share < 1:
            raise UsageError(f"{self}: the share of a processor must be between 0 and 1, and is {self.share:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd(Fault):
    """So many processes for each processor compute beside the job for `seconds`."""

    WORD = "crowd"
    processes: int = 3
    seconds: float = 10.0
    ABOUT = About(
        place=Place.PROCESS,
        enters="processes of their own, which the job shares its processors with",
        promised="nobody is named, since all nodes have it in common",
        row=SLOW,
        replay=Replay.TIMED,
    )

    def make(self, job: LiveJob) -> bool:
        """Start them."""
        job.note("crowd")
        crowd = ExitStack()
        crowd.enter_context(hogs(self.processes))
        job.later(self.seconds, crowd.close)
        return True

    def check(self) -> None:
        """Refuse nobody, more than a machine has room for, and no time."""
        if not 1 <= self.processes <= CROWDED:
            raise UsageError(f"{self}: processes= is from 1 to {CROWDED}, for each processor")
        check_seconds(self, self.seconds)

    def __str__(self) -> str:
        return f"crowd of {self.processes} for {self.seconds:g} s {self.when}"


KINDS = (
    Kill,
    KillBelow,
    KillTrainer,
    KillTemplate,
    KillKeeper,
    KillCompanion,
    KillLoader,
    Stop,
    Continue,
    Freeze,
    Pause,
    Flap,
    Slow,
    Crowd,
)
