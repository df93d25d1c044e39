"""The costs of machines: of the devices, of the links between them, and what each step costs besides.

All are effective figures, as measured with the model's own shapes and message sizes, not those of data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One kind of link, per device. bandwidth: bytes per second each way. latency: seconds per message."""

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One slot's device.

    flops: per second, reached by the model's products. memory: bytes in all. memory_bandwidth: bytes per second.
    reserve: bytes of memory that the model cannot use: contexts, communicators, fragments.
    """

    name: str = ""
    flops: float
    memory: int
    memory_bandwidth: float
    reserve: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The figures from which the planner predicts.

    inside: link between slots of one node. between: link between nodes. forward: fixed seconds of each forward of a
    stage besides its FLOPs (launches, the interpreter); a backward costs twice that. step: fixed seconds of each step.
    overlap: share of the data-parallel communication that can hide behind computation, 0 to 1. cores: how many devices
    can compute at the same time, if they are only processes on shared cores; 0 if each has its own.
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
