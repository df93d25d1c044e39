"""Faults of what takes events and output: their disk is full, and whoever reads what a node prints dies or stops."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import ClassVar

from chaos.faults.fault import About, Ends, Need, OfNode, Place, Replay
from chaos.faults.live import LiveJob
from chaos.faults.spoilt_disk import OfDisk
from chaos.machine.processes import send

_ROW = "the reader of the output stops or dies, or the events' disk is full or hangs"
_GOES_ON = "training does not wait; what cannot be written is lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsFull(OfDisk):
    """The disk of a node's events has no room for `seconds`; it is a node that neither leads nor has rank 0."""

    WORD = "events-full"
    ABOUT = About(
        place=Place.DISK,
        enters="a file system of its own, mounted anew without room",
        promised=_GOES_ON,
        row=_ROW,
        needs=frozenset({Need.MOUNTS}),
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Fill it; not while there is no such node.

        Only the leader says which generations there are, and only rank 0 which steps: without their lines nothing
        would be left to judge by.
        """
        view = job.picture.generation
        others = () if view is None else [name for name in view.nodes[1:] if name != view.leader]
        if not others:
            return False
        disk = job.events_disk(others[-1])
        job.note("events full", others[-1])
        disk.fill()
        job.later(self.seconds, disk.restore)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class OfReader(OfNode):
    """SIGNAL to what reads a node's output through a pipe."""

    SIGNAL: ClassVar[signal.Signals]

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Send it."""
        reader = job.cluster.node(name).reader
        assert reader is not None, "nobody reads this node's output"
        job.note(self.WORD, name)
        send([reader.pid], self.SIGNAL)
        return True


def _of_reader(enters: str) -> About:
    return About(place=Place.PROCESS, enters=enters, promised=_GOES_ON, row=_ROW, ends=Ends.NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class KillReader(OfReader):
    """SIGKILL to the process that reads what a node prints, so that its pipe is broken."""

    WORD = "kill-log-reader"
    SIGNAL = signal.SIGKILL
    ABOUT = _of_reader("SIGKILL to the reader of the agent's output")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReader(OfReader):
    """SIGSTOP to the process that reads what a node prints, for good, so that its pipe fills."""

    WORD = "stop-log-reader"
    SIGNAL = signal.SIGSTOP
    ABOUT = _of_reader("SIGSTOP to the reader of the agent's output")


KINDS = (KillReader, StopReader, EventsFull)
