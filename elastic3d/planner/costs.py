"""What machines cost: the devices, the links between them, and what each step pays besides.

All are effective figures, as measured on the model's own shapes and sizes of message, not those of data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a device sends over one kind of link. bandwidth: bytes per second each way. latency: seconds a message."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot's device.

    flops: per second, that the model's products reach. memory: bytes there are. memory_bandwidth: bytes per second.
    reserve: bytes of memory that are never the model's: contexts, communicators, fragments.
    """

    name: str = ""
    flops: float
    memory: int
    memory_bandwidth: float
    reserve: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the planner predicts with.

    inside: link between slots of one node. between: link between nodes. forward: fixed seconds of each forward of a
    stage besides its FLOPs (launches, the interpreter); a backward pays twice that. step: fixed seconds of each step.
    overlap: share of the data-parallel communication that can hide behind computation, 0 to 1. cores: devices that
    compute at the same time, for devices that are only processes on shared cores; 0 where each has its own.
    change: seconds of work that a change of layout costs.
    """

    device: Device
    inside: Link
    between: Link
    forward: float = 0.0
    step: float = 0.0
    overlap: float = 0.5
    cores: int = 0
    change: float = 60.0
