"""What is found of nodes that slow the others down: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.membership.slowness import Slowness


class SlowKind(StrEnum):
    """What is slow about a node."""

    COMPUTE = "compute"
    DATA = "data"
    HOST = "host"  # updates, snapshots
    LINK = "link"  # its connections to all others


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """A node that slows the others down. id: of the node. ranks: those of it that show it.

    rho: its work takes so many times as long; of data and host: the step does. since: the step from which on.
    windows, of: in how many of the last windows it showed. cost: seconds of a step that nobody would miss, if it were
    not. seconds: of steps since `since`. detail: in words.
    """

    id: str
    rho: float
    kind: SlowKind
    since: int
    ranks: tuple[int, ...] = ()
    windows: int = 0
    of: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    detail: str = ""

    @property
    def slowness(self) -> Slowness:
        """What the membership is told."""
        return Slowness(rho=self.rho, kind=str(self.kind), since=self.since)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFinding:
    """What is known after a step. slow: all slow nodes by id; left: those that were.

    entered: those that became so, or were before this generation and now are seen to be in it, too.
    """

    key: str
    step: int
    slow: Mapping[str, SlowNode]
    entered: tuple[SlowNode, ...] = ()
    left: tuple[SlowNode, ...] = ()
