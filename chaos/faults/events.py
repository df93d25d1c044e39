"""Faults of what takes events and output: their disk is spoilt, and whoever reads what a node prints dies or stops."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from chaos.faults.fault import About, Ends, Need, OfNode, Place, Replay
from chaos.faults.live import LiveJob
from chaos.faults.spoilt_disk import OfDisk
from chaos.machine.processes import send

_ROW = "the reader of the output stops or dies, or the events' disk is full or hangs"
_GOES_ON = "training does not wait; what cannot be written is lost"


def _of_disk(enters: str, need: Need) -> About:
    return About(
        place=Place.DISK,
        enters=enters,
        promised=_GOES_ON,
        row=_ROW,
        needs=frozenset({need}),
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEvents(OfDisk):
    """Something that lasts for `seconds` on the disk of the events of a node that neither leads nor has rank 0."""

    LEAST_NODES = 3

    @abstractmethod
    def spoil(self, job: LiveJob, name: str) -> Callable[[], None]:
        """Do it to that node's, and return what undoes it."""

    def make(self, job: LiveJob) -> bool:
        """Do it for so long; not while there is no such node.

        Only the leader says which generations there are, and only rank 0 which steps: without their lines nothing
        would be left to judge by.
        """
        view = job.picture.generation
        others = () if view is None else [name for name in view.nodes[1:] if name != view.leader]
        if not others:
            return False
        job.note(self.WORD.replace("-", " "), others[-1])
        job.later(self.seconds, self.spoil(job, others[-1]))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsFull(OfEvents):
    """The disk of a node's events has no room for `seconds`; it is a node that neither leads nor has rank 0."""

    WORD = "events-full"
    ABOUT = _of_disk("a file system of its own, mounted anew without room", Need.MOUNTS)

    def spoil(self, job: LiveJob, name: str) -> Callable[[], None]:
        """Fill it."""
        disk = job.events_disk(name)
        disk.fill()
        return disk.restore


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsHang(OfEvents):
    """The disk of such a node's events answers no write for `seconds`, so that who writes cannot be killed."""

    WORD = "events-hang"
    ABOUT = _of_disk("a FUSE file system, which keeps back its answers", Need.FUSE)

    def spoil(self, job: LiveJob, name: str) -> Callable[[], None]:
        """Hold its writes."""
        file = job.events_file(name)
        file.hang()
        return file.restore


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsGone(OfEvents):
    """Each write to the disk of such a node's events fails for `seconds`, as to a device that was taken away."""

    WORD = "events-gone"
    ABOUT = _of_disk("a FUSE file system, which answers with EIO", Need.FUSE)

    def spoil(self, job: LiveJob, name: str) -> Callable[[], None]:
        """Refuse its writes."""
        file = job.events_file(name)
        file.refuse()
        return file.restore


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


KINDS = (KillReader, StopReader, EventsFull, EventsHang, EventsGone)
