"""What the report of a run tells: a frozen value, which `elastic3d report --json` prints.

Times are whole microseconds since the run's first event, by one clock, where they are not said to be others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.accounting.goodput import Goodput
from elastic3d.accounting.spans import Category
from elastic3d.pages.findings import PageFinding


class RunEnding(StrEnum):
    """How a run ended, as far as its nodes wrote it down."""

    DONE = "done"
    """Its script came to its end."""
    FAILED = "failed"
    """It ended with an error."""
    OPEN = "open"
    """No node of the last generation wrote that it ended: it goes on, or all were killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportGeneration:
    """A generation of the run."""

    number: int
    """Its number."""
    start: int
    """Which start of the run it belongs to, from 0: a run that is started again may count from 1 again."""
    sealed: int
    """When it was sealed."""
    cause: str
    """Why it came to be, "" where its sealing is not in the files."""
    detail: str
    """The same in words."""
    leader: str
    """The node that led the membership then."""
    active: int
    """How many nodes trained in it."""
    spares: int
    """How many were spares."""
    joined: tuple[str, ...]
    """Nodes that it had, and the one before had not."""
    left: tuple[str, ...]
    """Nodes that the one before had, and it had not."""
    layout: str
    """The sizes of its mesh, "" where it had none."""
    first_step: int | None
    """The first step that it made, None if it made none."""
    last_step: int | None
    """The last one."""
    steps_lost: int
    """Steps of it that did not count: a later generation went back behind them."""
    microseconds: int
    """What it cost, in node-microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPart:
    """A part of a recovery."""

    category: Category
    """What it was."""
    microseconds: int
    """How long it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRecovery:
    """What came before the first step of a generation, as the node of its rank 0 spent it."""

    generation: int
    """The generation's number."""
    start: int
    """Which start of the run it belongs to."""
    cause: str
    """Why the generation came to be."""
    node: str
    """Whose time it was."""
    at: int
    """When it began."""
    microseconds: int
    """How long it took, from beginning to end; parts of a change that was prepared beside the training lie apart."""
    state: str
    """Where the state came from, such as "memory"; "" where that is not known."""
    parts: tuple[RecoveryPart, ...]
    """In order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBand:
    """Time that a node spent on one thing, or mostly on it."""

    start: int
    """When it began."""
    stop: int
    """When it ended."""
    category: Category
    """What most of it went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimeline:
    """What the time of one node went to, in order."""

    node: str
    """Its name."""
    bands: tuple[TimeBand, ...]
    """Its time, cut into at most 600 equal parts of the run's where it has more changes than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A point of the curve of loss and of seconds: one step, or many successive ones."""

    step: int
    """The last of its steps."""
    loss: float | None
    """Their mean loss, None where it is not known or not finite."""
    low: float | None
    """The least of them, None where the point stands for one step."""
    high: float | None
    """The greatest of them."""
    seconds: float
    """Mean seconds of a step."""
    generation: int
    """The generation that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputPoint:
    """What was made of steps that count in a part of the run's time."""

    at: int
    """The middle of that part."""
    per_second: float
    """Samples a second, or steps where no step says how many samples it had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCheckpoint:
    """A checkpoint that the run wrote."""

    step: int
    """The step whose state it is."""
    committed: int | None
    """When it was committed, None where no node wrote that it was."""
    generation: int
    """The number of the generation at that time, or when the first node had written its part."""
    nodes: int
    """How many nodes wrote that their part of it is in the store."""
    bytes: int
    """Bytes of these parts."""
    new: int
    """Bytes of them that were not in the store before."""
    seconds: float
    """What the slowest node took to write its part, 0 where that is not known."""
    verified: str
    """How much of it was read back: "sample" or "all", "" for nothing."""
    vetted: bool
    """Whether audits vouch for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTrouble:
    """Something about checkpoints that failed, and perhaps again."""

    at: int
    """When it was first written down."""
    event: str
    """The event, such as "checkpoint.failed"."""
    step: int | None
    """The step that it is about, None where it is about none."""
    nodes: tuple[str, ...]
    """The nodes that wrote it down."""
    error: str
    """What failed."""
    times: int
    """How often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What became of a run; with a `schema`, what `elastic3d report --json` prints."""

    summary: str
    """What happened, in one line."""
    ending: RunEnding
    """How it ended."""
    error: str
    """The error that it ended with, "" for none."""
    account: Goodput
    """Where the time went."""
    generations: tuple[ReportGeneration, ...]
    """In order."""
    recoveries: tuple[ReportRecovery, ...]
    """In order."""
    timelines: tuple[NodeTimeline, ...]
    """Of all nodes, in the order in which they came."""
    curve: tuple[CurvePoint, ...]
    """Of the steps that count, in order; at most 1536 points."""
    throughput: tuple[ThroughputPoint, ...]
    """In order, over all of the run's time."""
    throughput_unit: str
    """What it counts: "samples" or "steps"."""
    findings: tuple[PageFinding, ...]
    """What was found about it, the newest generation first."""
    checkpoints: tuple[ReportCheckpoint, ...]
    """Oldest step first."""
    troubles: tuple[CheckpointTrouble, ...]
    """What failed of them, oldest first."""
