"""Memory that ran out: what was missing on a rank, and what a generation was formed to need less than.

Both are records. A shortfall is in the report of the node on which it happened, and the bound in the record of every
generation that follows, so that a later leader plans with what was learned.
"""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTED = ("none", "selective", "full")
"""What blocks compute again in the backward pass, by memory: each keeps less than the one before."""

STANDBY = "e3d-standby"
"""The name, as the kernel has it, of a process that holds memory of a device for the next trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Memory ran out on a rank.

    host: the host's memory. device: the kind that the rank computes on, "cpu" where that is the host. asked: bytes
    that could not be had, free: bytes that nobody held then, total: bytes there are; each 0 if it is not known.
    killed: the kernel ended the trainer for it.
    """

    rank: int
    host: bool
    device: str = "cpu"
    asked: int = 0
    free: int = 0
    total: int = 0
    killed: bool = False

    @property
    def missing(self) -> int:
        """Bytes that were missing; 0 if that is not known: nobody said what was free, or it was in pieces."""
        return max(0, self.asked - self.free) if self.total else 0

    @property
    def elsewhere(self) -> bool:
        """Whether it was not the memory in which the rank computes."""
        return self.host and self.device != "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """What memory that ran out has taught a job.

    most: bytes that a rank may need by the planner's word. recompute: of `RECOMPUTED`, what blocks compute again at
    least in this generation, whatever the script asks for; chosen with its layout.
    """

    most: int
    recompute: str = "none"


def stronger(one: str, other: str) -> str:
    """Return that of two kinds of `RECOMPUTED` which keeps less."""
    return max(one, other, key=RECOMPUTED.index)
