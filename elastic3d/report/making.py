"""The report of a run, from what its nodes left. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic3d.accounting.clock_offsets import ClockOffset
from elastic3d.accounting.goodput import Goodput, goodput
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.past_run import ACCOUNTED, PastGeneration, PastRun
from elastic3d.accounting.recorded_events import SECOND
from elastic3d.accounting.recoveries import recoveries
from elastic3d.accounting.spans import Span
from elastic3d.cli.ckpt.render.words import count, percent
from elastic3d.cli.goodput_words import spelled
from elastic3d.health.explanation import Formed
from elastic3d.health.meanings import MEANINGS
from elastic3d.health.past_verdicts import EVENTS_OF_VERDICTS, PastVerdict, event_verdict, place_of
from elastic3d.health.trouble import Trouble, distinct, is_trouble
from elastic3d.pages.findings import PageFinding, findings
from elastic3d.pages.series import StepSeries, step_figures
from elastic3d.report.checkpoints import OF_CHECKPOINTS, OF_TROUBLE, checkpoints, troubles
from elastic3d.report.document import (
    CurvePoint,
    NodeTimeline,
    RecoveryPart,
    ReportGeneration,
    ReportRecovery,
    RunEnding,
    RunReport,
)
from elastic3d.report.shares import bands, throughput

REPORTED = ACCOUNTED | {"job.ended", *OF_CHECKPOINTS, *OF_TROUBLE, *MEANINGS, *EVENTS_OF_VERDICTS}
"""Events of whose fields a report makes use."""

FINDINGS = 100
"""Most findings that a report has."""

LONGEST = 4000
"""Characters of the error that a run ended with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatWasLeft:
    """A run that is to be reported. bundles: verdicts with their evidence. remarks: what could not be read."""

    name: str
    run: PastRun
    clocks: Sequence[ClockOffset] = ()
    others: Sequence[str] = ()
    bundles: Sequence[PastVerdict] = field(default=())
    remarks: Sequence[str] = ()


def report(of: WhatWasLeft) -> RunReport:
    """Return the report of a run."""
    run = of.run
    spans = node_spans(run)
    account = goodput(of.name, run, spans, of.clocks, other_runs=of.others, remarks=of.remarks)
    ending, error = _ending(run)
    made, unit = throughput(run.generations, run.first, run.last)
    return RunReport(
        summary=_summary(account, ending),
        ending=ending,
        error=error,
        account=account,
        generations=tuple(_generations(run, account)),
        recoveries=tuple(_recoveries(run, spans)),
        timelines=tuple(NodeTimeline(node=node, bands=bands(spans[node], run.first, run.last)) for node in run.nodes),
        curve=tuple(_curve(run)),
        throughput=made,
        throughput_unit=unit,
        findings=_findings(run, of.bundles, error if ending is RunEnding.FAILED else ""),
        checkpoints=checkpoints(run),
        troubles=troubles(run),
    )


def _ending(run: PastRun) -> tuple[RunEnding, str]:
    """Return how the last generation's nodes ended; a node that left before ended, too, and says nothing of the run."""
    start = max((generation.start for generation in run.generations), default=0)
    lives = {life.node: life for life in run.lives if life.start == start}
    if run.generations:
        lives = {node: life for node, life in lives.items() if node in run.generations[-1].nodes} or lives
    ends = [event for life in lives.values() for event in life.events if event.name == "job.ended"]
    errors = [event for event in ends if event.text("kind") == "error"]
    if errors:
        return RunEnding.FAILED, errors[0].text("error")[:LONGEST]
    return (RunEnding.DONE if ends else RunEnding.OPEN), ""


def _summary(account: Goodput, ending: RunEnding) -> str:
    generations = count(len(account.generations), "generation")
    words = {
        RunEnding.DONE: "it came to its end",
        RunEnding.FAILED: "it ended with an error",
        RunEnding.OPEN: "no node wrote that it ended: it goes on, or was killed",
    }
    share = f"; {percent(account.goodput, 1)} of the nodes' time went to steps that count" if account.held else ""
    made = f"{count(account.steps, 'step')} in {spelled(account.microseconds)} on {count(len(account.nodes), 'node')}"
    return f"{made}, in {generations}; {words[ending]}{share}"


def _generations(run: PastRun, account: Goodput) -> Iterator[ReportGeneration]:
    for one, costs in zip(run.generations, account.generations, strict=True):
        steps = [step.step for step in one.steps]
        yield ReportGeneration(
            number=one.number,
            start=one.start,
            sealed=one.sealed - run.first,
            cause=one.cause,
            detail=one.detail,
            leader=one.leader,
            active=len(one.nodes),
            spares=len(one.spares),
            joined=one.come,
            left=one.gone,
            layout=_layout(one),
            first_step=min(steps, default=None),
            last_step=max(steps, default=None),
            steps_lost=sum(step.lost_to >= 0 for step in one.steps),
            microseconds=costs.microseconds,
        )


def _layout(one: PastGeneration) -> str:
    """Return a layout in words, as far as its sizes are numbers."""
    layout = one.formed.fields.get("layout") if one.formed is not None else None
    if not isinstance(layout, dict):
        return ""
    sizes = {name: layout.get(name) for name in ("pp", "dp", "cp", "tp") if name != "cp" or layout.get(name) != 1}
    said = " x ".join(f"{name} {size}" for name, size in sizes.items() if isinstance(size, int))
    zero = layout.get("zero")
    return f"{said}, ZeRO-{zero}" if said and isinstance(zero, int) else said


def _recoveries(run: PastRun, spans: Mapping[str, Sequence[Span]]) -> Iterator[ReportRecovery]:
    for one in recoveries(run, spans):
        restored = one.generation.restored.get(one.node)
        yield ReportRecovery(
            generation=one.generation.number,
            start=one.generation.start,
            cause=one.generation.cause,
            node=one.node,
            at=one.start - run.first,
            microseconds=one.stop - one.start,
            state=restored.source if restored is not None else "",
            parts=tuple(RecoveryPart(category=span.category, microseconds=span.length) for span in one.spans),
        )


def _curve(run: PastRun) -> Iterator[CurvePoint]:
    """Yield the points of the steps that count, each step once."""
    counting = {
        step.step: (generation, step) for generation in run.generations for step in generation.steps if step.lost_to < 0
    }
    series = StepSeries()
    for number, (generation, step) in sorted(counting.items()):
        figures = step_figures(number, step.event.fields.get("loss"), step.length / SECOND, generation.number)
        if figures is not None:
            series.add(figures)
    for chunk in series.chunks().values():
        for point in chunk:
            step_number, loss, seconds, generation_number, low, high = (*point, None, None)[:6]
            yield CurvePoint(
                step=int(step_number or 0),
                loss=loss,
                low=low,
                high=high,
                seconds=seconds or 0.0,
                generation=int(generation_number or 0),
            )


def _findings(run: PastRun, bundles: Sequence[PastVerdict], ended: str) -> tuple[PageFinding, ...]:
    events = [event for life in run.lives for event in life.events]
    known = {(place_of(one.verdict)[0], one.verdict.step) for one in bundles}
    verdicts = [(f"{one.verdict.key}/{one.verdict.step}", one) for one in bundles]
    for event in events:
        verdict = event_verdict(event.name, event.fields) if event.name in EVENTS_OF_VERDICTS else None
        if verdict is None or (event.generation, verdict.step) in known:
            continue
        verdicts.append((f"{event.name}/{verdict.key}/{verdict.step}", PastVerdict(verdict=verdict)))
    several = distinct(
        Trouble(event=event.name, generation=event.generation, at=event.at / SECOND, fields=event.fields)
        for event in events
        if is_trouble(event.name, event.fields)
    )
    formed = [Formed(number=one.number, active=len(one.nodes), left=one.gone) for one in run.generations]
    return findings(dict(verdicts).items(), several, formed=formed, ended=ended, most=FINDINGS)
