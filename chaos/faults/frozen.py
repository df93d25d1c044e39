"""Faults of one process of a node that is stopped for good: its agent, a keeper, or a template."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from chaos.faults.fault import About, Ends, Need, OfNode, Place
from chaos.faults.live import LiveJob
from chaos.faults.process import OfSlot, signal_one
from chaos.machine.processes import Part, send

_ALONE = "one of a node's keepers is stopped"
_SILENT = "a node falls silent: all its processes stop, or its network is cut"
_TRAINER = "a trainer or its template dies"


@dataclass(frozen=True, slots=True, kw_only=True)
class _FreezePart(OfSlot):
    """SIGSTOP to one process of a kind, for good, on a slot of a node."""

    PART: ClassVar[Part]

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it; not yet where there is none."""
        return signal_one(self.WORD, signal.SIGSTOP, self.PART, self.slot, job, name)

    def __str__(self) -> str:
        return f"{self.WORD} of slot {self.slot} of {self.node} {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeKeeper(OfNode):
    """SIGSTOP to a node's first keeper, for good."""

    WORD = "freeze-keeper"
    CHANGES = (-1,)
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the keeper of slot 0",
        promised="its neighbours miss it and agree, then as for a death",
        row=_SILENT,
        detector="generation.sealed",
        bar=10.0,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it; its agent waits for a keeper that never ends. Not yet where there is none."""
        stopped = signal_one(self.WORD, signal.SIGSTOP, Part.KEEPERS, 0, job, name)
        job.cluster.node(name).stopped |= stopped
        return stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeCompanion(_FreezePart):
    """SIGSTOP to a keeper that is not its node's first, for good."""

    WORD = "freeze-companion"
    CHANGES = (-1,)
    PART = Part.KEEPERS
    LEAST_SLOT = 1
    slot: int = 1
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the keeper of another slot than 0",
        promised="its node's first keeper kills it after ten seconds without an answer; as for a death",
        row=_ALONE,
        detector="generation.sealed",
        bar=20.0,
        needs=frozenset({Need.SLOTS}),
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it, by which its agent ends with an error; not yet where there is none."""
        stopped = signal_one(self.WORD, signal.SIGSTOP, self.PART, self.slot, job, name)
        job.cluster.node(name).killed |= stopped
        return stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeTemplate(_FreezePart):
    """SIGSTOP to the process that forks the trainers of a slot, for good."""

    WORD = "freeze-template"
    PART = Part.TEMPLATES
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the template of a slot",
        promised="nothing happens before the next generation, which another template forks",
        row=_TRAINER,
        ends=Ends.NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeAgent(OfNode):
    """SIGSTOP to a node's agent, for good; its keepers go on."""

    WORD = "freeze-agent"
    ABOUT = About(
        place=Place.PROCESS,
        enters="SIGSTOP to the agent",
        promised="nothing happens: the job needs no agent between its start and its end",
        row=_SILENT,
        ends=Ends.NOTHING,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Stop it; it is killed at the end, since it cannot end by itself."""
        job.note(self.WORD, name)
        node = job.cluster.node(name)
        node.stopped = True
        node.frozen.add(node.pid)
        send([node.pid], signal.SIGSTOP)
        return True


KINDS = (FreezeKeeper, FreezeCompanion, FreezeTemplate, FreezeAgent)
