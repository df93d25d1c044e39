"""What the page shows of a job at one moment: a frozen value. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic3d.cli.explain import formed_in, troubles_in
from elastic3d.dashboard.event_files import NotableEvent
from elastic3d.dashboard.moments import Moments
from elastic3d.dashboard.store_reading import StoreSeen
from elastic3d.health.past_verdicts import PastVerdict
from elastic3d.health.trouble import Trouble
from elastic3d.membership.inspection.keys import RunKeys
from elastic3d.membership.inspection.status import Status
from elastic3d.membership.records import GenerationHistory
from elastic3d.pages.findings import PageFinding, findings
from elastic3d.pages.series import StepFigures

FINDINGS = 12
"""Most findings that are shown."""

GENERATIONS = 60
"""Most generations that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """Everything that a page shows of a job. All times are of the wall clock of the machine that reads it.

    generations: newest first. moments: when things happened or will, by name: "sealed", "snapshot", "checkpoint",
    "verified", "vetted", and "left/<id>" for the end of a drain or a quarantine. chunks: as `StepSeries.chunks`.
    newest: the last steps. notables: newest first, None without event files. store: None where it is not read. away:
    why etcd did not answer, "" if it did; the rest is then as it was at `read_at`. read_at: when etcd last answered.
    """

    status: Status
    generations: tuple[GenerationHistory, ...]
    findings: tuple[PageFinding, ...]
    moments: Mapping[str, float]
    chunks: Mapping[str, list[list[float | int | None]]] = field(default_factory=dict)
    newest: tuple[StepFigures, ...] = ()
    notables: tuple[NotableEvent, ...] | None = None
    problems: tuple[str, ...] = ()
    store: StoreSeen | None = None
    away: str = ""
    read_at: float = 0.0


def generations_in(run_keys: RunKeys) -> tuple[GenerationHistory, ...]:
    """Return the newest generations of a job, newest first."""
    rows = sorted(run_keys.history.values(), key=lambda one: (one.number, one.attempt), reverse=True)
    return tuple(rows[:GENERATIONS])


def moments_of(status: Status, moments: Moments, now: float) -> dict[str, float]:
    """Return when what the status tells of happened, or will."""
    at: dict[str, float] = {}
    generation = status.generation
    if generation is not None and generation.age is not None:
        at["sealed"] = moments.steady(f"sealed/{generation.number}.{generation.attempt}", now - generation.age)
    for name in ("snapshot", "checkpoint", "verified", "vetted"):
        kept = getattr(status, name)
        if kept is not None:
            at[name] = moments.fixed(name, (kept.step, kept.age), now - kept.age)
    for node in status.nodes:
        if node.seconds_left is not None:
            name = f"left/{node.name}@{node.incarnation}"
            at[name] = moments.steady(f"{name}/{node.state}", now + node.seconds_left)
    return at


def findings_in(
    run_keys: RunKeys, told_by_events: Sequence[Trouble] = (), bundles: Sequence[PastVerdict] = ()
) -> tuple[PageFinding, ...]:
    """Return what was found about the generations of a job, newest first, as `elastic3d explain` tells it.

    told_by_events: troubles that only the event files know of. bundles: verdicts with their evidence, where there are
    event files; etcd forgets verdicts of old generations.
    """
    with_evidence = {one.verdict: one for one in bundles}
    verdicts = [
        (key, with_evidence.pop(verdict, PastVerdict(verdict=verdict))) for key, verdict in run_keys.verdicts.items()
    ]
    verdicts += [(f"{one.verdict.key}/{one.verdict.step}", one) for one in with_evidence.values()]
    ended = run_keys.end.detail if run_keys.end is not None and run_keys.end.failed else ""
    troubles = (*troubles_in(run_keys), *told_by_events)
    return findings(verdicts, troubles, formed=formed_in(run_keys), ended=ended, most=FINDINGS)
