"""Faults of a file system: it never answers."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.code import NAMED, STUCK
from chaos.faults.fault import Ends, Need, Place
from chaos.faults.live import LiveJob
from chaos.faults.script import InScript, about

_FUSE = frozenset({Need.FUSE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked(InScript):
    """A rank reads a file whose bytes never come, in state D."""

    WORD = "blocked"
    ABOUT = about(Place.DISK, "a FUSE file system", NAMED, STUCK, "rank.stuck", 5.0, _FUSE, ends=Ends.NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkillable(InScript):
    """A rank asks for a file in a folder that never answers: in state D, which SIGKILL does not end."""

    WORD = "unkillable"
    CHANGES = (-1,)
    LEAST_NODES = 2
    ABOUT = about(
        Place.DISK,
        "a FUSE file system",
        "its node leaves for good with an error that says what it waits for; the others go on without it",
        "a trainer cannot be killed: it waits in the kernel (state D) for a file system or a device that does not "
        "answer",
        "rank.stuck",
        5.0,
        _FUSE,
        ends=Ends.NODE,
    )

    def make(self, job: LiveJob) -> bool:
        """Return whether the script has done it; its node ends with an error then."""
        node = job.marked(self.when.step)
        if node is None or not InScript.make(self, job):
            return False
        job.cluster.node(node).killed = True
        # Else nothing ends the process, and what it holds is left behind.
        job.at_end(job.hung_files.release)
        return True


KINDS = (Blocked, Unkillable)
