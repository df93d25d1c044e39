"""The stages: what each measures, and how long it may take. Imports nothing that a bare machine may lack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_LIMIT = 600.0
"""Seconds for any stage at the small size, which is run where other work may slow it down."""

SHORTEST = 5.0
"""Seconds below which no stage is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. module: below chaos.gpu, with a function `measure(bench)`. seconds: its limit at the full size."""

    name: str
    module: str
    seconds: float
    measures: str

    def limit(self, size: str, left: float) -> float:
        """Return its seconds where `left` are left of the budget; 0.0 where it is better not started."""
        most = min(self.seconds if size == "full" else SMALL_LIMIT, left)
        return most if most >= SHORTEST else 0.0


STAGES: tuple[Stage, ...] = (
    Stage(
        name="P0",
        module="machine",
        seconds=20,
        measures="versions; memfd seals, pidfd, subreaper; memory, huge pages; gloo's operations on device tensors",
    ),
    Stage(
        name="P1",
        module="starting",
        seconds=80,
        measures="a generation's start: fork to context, first product, first attention, NCCL world of one, compiler",
    ),
    Stage(
        name="P2",
        module="killing",
        seconds=70,
        measures="SIGKILL: seconds to reaped, group gone, memory back, a sibling's allocation",
    ),
    Stage(
        name="P3",
        module="contexts",
        seconds=30,
        measures="two contexts on one device: slowdown of a step while another process builds, two NCCL worlds, memory",
    ),
    Stage(
        name="P4",
        module="snapshots",
        seconds=160,
        measures="snapshots: the ways to copy, slowdown of products beside, BLAKE3, late work, back to the device",
    ),
    Stage(
        name="P5",
        module="kernels",
        seconds=120,
        measures="the vote's stall; the fold as loop and kernel; squares of rows, fill, attention, AdamW whole and cut",
    ),
    Stage(
        name="P6",
        module="same_bits",
        seconds=220,
        measures="digests of layouts, each in two fresh processes; kill and restore; initialisation of a large model",
    ),
    Stage(
        name="P7",
        module="end_to_end",
        seconds=300,
        measures="etcd and torchrun: kill to next step in its parts; three nodes: kill, join, drain; a step's cost",
    ),
)


BY_VALUE = "P0,P6,P7,P1,P2,P4,P3,P5"
"""All of them: first what matters most, where the budget does not reach for all."""


def chosen(text: str) -> tuple[Stage, ...]:
    """Return the stages of a text such as "P6,P0", in that order; ValueError names one that is not there."""
    by_name = {stage.name: stage for stage in STAGES}
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_name]
    if unknown or not names:
        raise ValueError(f"--stages {text!r}: give some of {', '.join(by_name)}, separated by commas")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def table(stages: Sequence[Stage] = STAGES) -> str:
    """Return the stages for people."""
    return "\n".join(f"{stage.name}  {stage.seconds:4.0f} s  {stage.measures}" for stage in stages)
