"""What the page shows of a job at one moment: a frozen value. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic3d.cli.explain import formed_in, troubles_in
from elastic3d.dashboard.event_files import NotableEvent
from elastic3d.dashboard.moments import Moments
from elastic3d.dashboard.series import StepFigures
from elastic3d.health.explanation import explain, page
from elastic3d.health.trouble import Trouble, explain_trouble, trouble_page
from elastic3d.membership.inspection.keys import RunKeys
from elastic3d.membership.inspection.status import Status
from elastic3d.membership.records import GenerationHistory

FINDINGS = 12
"""Most findings that are shown."""

GENERATIONS = 60
"""Most generations that are shown."""

_ODD = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
"""What explaining raises on a record or event whose fields are not such as elastic3d writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFinding:
    """What was found about a generation. text: the page that `elastic3d explain` prints."""

    generation: int
    key: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDocument:
    """Everything that a page shows of a job. All times are of the wall clock of the machine that reads it.

    generations: newest first. moments: when things happened or will, by name: "sealed", "snapshot", "checkpoint",
    "verified", "vetted", and "left/<id>" for the end of a drain or a quarantine. chunks: as `StepSeries.chunks`.
    newest: the last steps. notables: newest first, None without event files. away: why etcd did not answer, "" if it
    did; the rest is then as it was at `read_at`. read_at: when etcd last answered.
    """

    status: Status
    generations: tuple[GenerationHistory, ...]
    findings: tuple[PageFinding, ...]
    moments: Mapping[str, float]
    chunks: Mapping[str, list[list[float | int | None]]] = field(default_factory=dict)
    newest: tuple[StepFigures, ...] = ()
    notables: tuple[NotableEvent, ...] | None = None
    problems: tuple[str, ...] = ()
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


def findings_in(run_keys: RunKeys, told_by_events: Sequence[Trouble] = ()) -> tuple[PageFinding, ...]:
    """Return what was found about the generations of a job, newest first, as `elastic3d explain` tells it.

    told_by_events: troubles that only the event files know of.
    """
    formed = formed_in(run_keys)
    ended = run_keys.end.detail if run_keys.end is not None and run_keys.end.failed else ""
    rows: list[tuple[tuple[int, int, float], PageFinding]] = []
    for key, verdict in run_keys.verdicts.items():
        try:
            explanation = explain(verdict, formed=formed, ended=ended)
            said = page(explanation)
        except _ODD:
            continue  # a record that somebody else wrote
        order = (explanation.generation, explanation.step, float(explanation.attempt))
        rows.append((order, _finding(f"verdict/{key}", explanation.generation, explanation.fault, said)))
    troubles = sorted(filter(_orderly, (*troubles_in(run_keys), *told_by_events)), key=lambda one: one.moment)
    for trouble in troubles[-FINDINGS:]:
        try:
            explanation = explain_trouble(trouble, troubles, formed=formed, ended=ended)
            said = trouble_page(explanation)
        except _ODD:
            continue
        key = f"{trouble.event}/{trouble.generation}/{trouble.step}/{trouble.at:.3f}"
        rows.append((trouble.moment, _finding(key, trouble.generation, explanation.fault, said)))
    rows.sort(key=lambda row: row[0], reverse=True)
    return tuple(finding for _, finding in rows[:FINDINGS])


def _orderly(trouble: Trouble) -> bool:
    """Return whether an event's figures are such as elastic3d writes: others would spoil the order of all."""
    try:
        return isinstance(trouble.moment, tuple) and isinstance(trouble.nodes, tuple) and trouble.ranks is not None
    except (TypeError, ValueError, OverflowError):
        return False


def _finding(key: str, generation: int, fault: str, said: str) -> PageFinding:
    lines = said.splitlines()
    title = next((line.strip() for line in lines[1:] if line.strip()), fault)
    return PageFinding(generation=generation, key=key, title=f"{fault}: {title}" if fault else title, text=said)
