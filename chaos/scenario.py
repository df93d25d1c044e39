"""Faults and joins of a job, and their moments, as values.

    kill NODE@STEP      SIGKILL to the node's agent once that step is committed; the whole node goes with it
    join @STEP          a fresh node, started early and held, is let in once that step is committed
    drain NODE@STEP     an operator's order to leave, in etcd
    sigterm NODE@STEP   SIGTERM to the node's agent, as a scheduler sends it
    notice NODE@STEP    the node's cloud says that it takes the machine
    stop NODE@STEP      SIGSTOP to all processes of the node; `cont` wakes them, else they are killed at the end
    pause NODE@STEP     SIGSTOP to one kind of its processes, and SIGCONT some seconds later
    flap NODE@STEP      SIGKILL, and the same node is started anew at once
    throttle NODE@STEP  its trainers have a share of one processor from then on

NODE is a name such as `node1`, a bare number, `leader` (who leads the membership then) or `stage0` (who holds rank 0
then). Instead of a step, `gN` means "once generation N is sealed", which is in the middle of its recovery.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from chaos.follow import Picture
from elastic3d.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A moment of a job: a step is committed, or a generation is sealed; exactly one is given, from 1 up."""

    step: int = 0
    generation: int = 0

    def come(self, picture: Picture) -> bool:
        """Return whether the moment has come in `picture`."""
        if self.generation:
            return any(view.number >= self.generation for view in picture.generations)
        return picture.step >= self.step

    def __str__(self) -> str:
        return f"@g{self.generation}" if self.generation else f"@{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfNode:
    """Something that happens to one node; WORD is its name on the command line."""

    WORD: ClassVar[str]
    node: str
    when: When

    def __str__(self) -> str:
        return f"{self.WORD} {self.node}{self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(OfNode):
    """Kill a node with SIGKILL."""

    WORD = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(OfNode):
    """Order a node to leave within `seconds`."""

    WORD = "drain"
    seconds: float = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(OfNode):
    """Send SIGTERM to a node's agent."""

    WORD = "sigterm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce(OfNode):
    """Have the node's metadata server announce that the machine is taken."""

    WORD = "notice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(OfNode):
    """Stop all processes of a node with SIGSTOP."""

    WORD = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continue(OfNode):
    """Wake a stopped node."""

    WORD = "cont"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flap(OfNode):
    """Kill a node with SIGKILL and start it again at once, under its name."""

    WORD = "flap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(OfNode):
    """Let a node's trainers have no more than `share` of one processor from then on."""

    WORD = "throttle"
    share: float


class Part(StrEnum):
    """Which of a node's processes."""

    AGENT = "agent"
    KEEPERS = "keepers"
    TEMPLATES = "templates"
    TRAINERS = "trainers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(OfNode):
    """Stop one kind of a node's processes with SIGSTOP and wake them `seconds` later."""

    WORD = "pause"
    part: Part
    seconds: float

    def __str__(self) -> str:
        return f"pause the {self.part} of {self.node} for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Let a fresh node in."""

    when: When

    def __str__(self) -> str:
        return f"join {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPause:
    """Stop etcd with SIGSTOP and wake it `seconds` later."""

    seconds: float
    when: When

    def __str__(self) -> str:
        return f"pause etcd for {self.seconds} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRestart:
    """Kill etcd with SIGKILL and start it again on the same data `seconds` later."""

    seconds: float
    when: When

    def __str__(self) -> str:
        return f"restart etcd after {self.seconds} s {self.when}"


Departure = Kill | Drain | Terminate | Announce
"""After these a node is gone for good."""
Fault = OfNode | Join | EtcdPause | EtcdRestart


def node_name(number: int) -> str:
    """Return the name of the cluster's node `number`, counted from 0."""
    return f"node{number}"


def parse_kill(text: str) -> Kill:
    """Return the kill that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--kill", text)
    return Kill(node=node, when=when)


def parse_drain(text: str) -> Drain:
    """Return the drain that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--drain", text)
    return Drain(node=node, when=when)


def parse_stop(text: str) -> Stop:
    """Return the stop that NODE@STEP asks for; UsageError where it is not one."""
    node, when = _place("--stop", text)
    return Stop(node=node, when=when)


def parse_join(text: str) -> Join:
    """Return the join that @STEP asks for; UsageError where it is not one."""
    match = re.fullmatch(r"@(g?)(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--join {text!r}: expected @STEP, such as @40")
    return Join(when=_when(f"--join {text!r}", match[1], match[2]))


def check(faults: Sequence[Fault], *, nodes: int, steps: int) -> None:
    """Raise UsageError where `faults` cannot happen to a job of `nodes` nodes and `steps` steps."""
    joins = sum(isinstance(fault, Join) for fault in faults)
    leaving = [fault for fault in faults if isinstance(fault, Departure | Stop)]
    for fault in faults:
        if not fault.when.generation and not 1 <= fault.when.step < steps:
            raise UsageError(f"{fault}: the step must be from 1 to {steps - 1}, or it never comes before the end")
        if isinstance(fault, OfNode) and fault.node.startswith("node") and int(fault.node[4:]) >= nodes + joins:
            raise UsageError(f"{fault}: there is no such node; the job has node0 to node{nodes + joins - 1}")
        if isinstance(fault, Announce | Continue) and not fault.node.startswith("node"):
            raise UsageError(f"{fault}: name the node by its number; who is {fault.node} may change")
    named = [fault.node for fault in leaving if fault.node.startswith("node")]
    if len(named) != len(set(named)):
        raise UsageError("a node can be killed, stopped or sent away only once")
    if len(leaving) >= nodes + joins:
        raise UsageError(f"{len(leaving)} losses leave none of {nodes + joins} nodes; leave at least one")


def bounds(faults: Sequence[Fault], nodes: int) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes for --nnodes, so that every fault finds its place."""
    alive = lowest = highest = nodes
    # At one step losses come before joins: a new node takes the place of a dead one.
    for fault in sorted(faults, key=lambda fault: (fault.when.step, not isinstance(fault, _Away))):
        for change in _changes(fault):
            alive += change
            lowest, highest = min(lowest, alive), max(highest, alive)
    return max(1, min(2, lowest)), highest


_Away = Departure | Stop | Flap


def _changes(fault: Fault) -> tuple[int, ...]:
    match fault:
        case Kill() | Drain() | Terminate() | Announce() | Stop():
            return (-1,)
        case Join() | Continue():
            return (1,)
        case Flap():
            return (-1, 1)
        case _:
            return ()


def resolve(node: str, picture: Picture) -> str | None:
    """Return the name of the node that `node` means now; None while no generation says."""
    view = picture.generation
    if node not in ("leader", "stage0"):
        return node
    if view is None:
        return None
    return view.leader if node == "leader" else view.nodes[0]


def _place(option: str, text: str) -> tuple[str, When]:
    match = re.fullmatch(r"(?:(?:node)?(\d+)|(leader|stage0))@(g?)(\d+)", text.strip())
    if match is None:
        raise UsageError(
            f"{option} {text!r}: expected NODE@STEP, such as 1@20, leader@20 or stage0@20; "
            "NODE is a number from 0, `leader` or `stage0`"
        )
    number, word, kind, count = match.groups()
    return word or node_name(int(number)), _when(f"{option} {text!r}", kind, count)


def _when(what: str, kind: str, number: str) -> When:
    if int(number) < 1:
        raise UsageError(f"{what}: counting starts at 1")
    return When(generation=int(number)) if kind else When(step=int(number))
