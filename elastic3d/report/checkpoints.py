"""The checkpoints of a run, as its nodes' events tell of them. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic3d.accounting.past_run import PastRun
from elastic3d.accounting.recorded_events import SECOND, RecordedEvent
from elastic3d.report.document import CheckpointTrouble, ReportCheckpoint

OF_CHECKPOINTS = frozenset({"checkpoint.written", "checkpoint.committed", "checkpoint.verified", "checkpoint.vetted"})
"""Events that tell of one checkpoint."""

OF_TROUBLE = frozenset(
    {
        "checkpoint.failed",
        "checkpoint.behind",
        "checkpoint.abandoned",
        "checkpoint.unverified",
        "checkpoint.uncollected",
        "checkpoint.unvetted",
        "checkpoint.damaged",
    }
)
"""Events that tell what failed of them."""

LONGEST = 2000
"""Characters of an error that are kept."""


@dataclass(slots=True, kw_only=True)
class _Written:
    """What is known of the checkpoint of a step. parts: bytes, new bytes and duration by node."""

    parts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    first: int = 0
    committed: int | None = None
    verified: str = ""
    vetted: bool = False


def checkpoints(run: PastRun) -> tuple[ReportCheckpoint, ...]:
    """Return the checkpoints of a run, by their steps: what was written and committed, in whichever generation."""
    by_step: dict[int, _Written] = {}
    for event in _events(run):
        step = event.whole("step")
        if event.name not in OF_CHECKPOINTS or step is None:
            continue
        one = by_step.setdefault(step, _Written(first=event.at))
        match event.name:
            case "checkpoint.written":
                one.parts[event.node] = (event.whole("bytes") or 0, event.whole("new") or 0, event.span("seconds"))
            case "checkpoint.committed":
                one.committed = event.at if one.committed is None else one.committed
            case "checkpoint.verified":
                one.verified = event.text("kind") if one.verified != "all" else one.verified
            case _:
                one.vetted = True
    sealed = [generation.sealed for generation in run.generations]
    rows = []
    for step, one in sorted(by_step.items()):
        at = one.committed if one.committed is not None else one.first
        place = bisect_right(sealed, at) - 1
        rows.append(
            ReportCheckpoint(
                step=step,
                committed=one.committed - run.first if one.committed is not None else None,
                generation=run.generations[place].number if place >= 0 else 0,
                nodes=len(one.parts),
                bytes=sum(part[0] for part in one.parts.values()),
                new=sum(part[1] for part in one.parts.values()),
                seconds=max((part[2] for part in one.parts.values()), default=0) / SECOND,
                verified=one.verified,
                vetted=one.vetted,
            )
        )
    return tuple(rows)


def troubles(run: PastRun) -> tuple[CheckpointTrouble, ...]:
    """Return what failed of a run's checkpoints; the same on several nodes, or again, is one."""
    rows: dict[tuple[str, int | None, str], CheckpointTrouble] = {}
    for event in _events(run):
        if event.name not in OF_TROUBLE:
            continue
        error, step = event.text("error")[:LONGEST], event.whole("step")
        key = event.name, step, error
        before = rows.get(key)
        if before is None:
            rows[key] = CheckpointTrouble(
                at=event.at - run.first, event=event.name, step=step, nodes=(event.node,), error=error, times=1
            )
        else:
            nodes = before.nodes if event.node in before.nodes else (*before.nodes, event.node)
            rows[key] = replace(before, nodes=nodes, times=before.times + 1)
    return tuple(rows.values())


def _events(run: PastRun) -> Sequence[RecordedEvent]:
    wanted = OF_CHECKPOINTS | OF_TROUBLE
    return sorted(
        (event for life in run.lives for event in life.events if event.name in wanted), key=lambda event: event.at
    )
