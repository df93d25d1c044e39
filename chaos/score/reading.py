"""The result of a trial, from the events and the marks that its job left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chaos.faults.network import Delay
from chaos.history.follow import Event, Follower
from chaos.judging.oracle import compare, judge
from chaos.playing.outcome import Outcome
from chaos.score.kinds import (
    ALTERED,
    DISPUTED,
    KINDS,
    MISCALCULATED,
    NOT_FINITE,
    SHORT,
    SLOW_LINK,
    SPIKED,
    SPLIT,
    UNFIT,
)
from chaos.score.results import Result, Said
from chaos.score.trials import Trial
from chaos.scripts import SECOND, mark_of
from elastic3d.health.hearing import Compared, Finding
from elastic3d.health.slow_node import SlowKind
from elastic3d.health.trouble import KNOWN

_CURES = ("stuck", "lying", "spike", "balance", "out_of_memory")


def read(
    trial: Trial,
    outcome: Outcome,
    quiet: Outcome,
    workdir: Path,
    *,
    begin: float = -math.inf,
    end: float = math.inf,
) -> Result:
    """Return what became of a trial, from what it left under `workdir`.

    begin, end: between which times by the wall clock all that was said is about it, where its job has other trials.
    """
    at, node = happened_at(workdir, trial.step), _marked(workdir, mark_of(trial.step))
    for done in outcome.injections:
        if done.kind in ("throttle", Delay.WORD):
            at, node = done.at, done.node
    events = [event for event in Follower(workdir / "events").poll() if begin <= event.at < end]
    generations = [view for view in outcome.picture.generations if not view.sealed_at > at]
    said = tuple(_said(events, at))
    named_at = next((one.after + at for one in said if one.act), math.inf)
    later = [step.at for step in outcome.picture.steps if step.at > named_at]
    causes = (*_CURES, "failure") if KINDS[trial.kind].starts_again else _CURES
    cured = [v for v in outcome.picture.generations if v.cause in causes and begin <= v.sealed_at < end]
    if not node and generations:
        node = generations[-1].nodes[trial.rank // outcome.setting.slots]
    differences = compare(outcome, quiet)
    missed = [f"it did not happen: {_formed(outcome)}"] if math.isnan(at) and not KINDS[trial.kind].control else []
    return Result(
        trial=trial,
        node=node,
        happened=not math.isnan(at),
        said=said,
        recovered=min(later) - at if later else math.nan,
        steps_lost=sum(view.steps_repeated for view in cured),
        same_bits=not differences,
        # Who is named is what the card judges; what the script does to itself, or hogs do, is not in the outcome.
        broken=(*missed, *judge(outcome).broken, *differences),
        liar=_marked(workdir, SECOND),
    )


def _formed(outcome: Outcome) -> str:
    """Return which nodes a job trained on: ranks that were drawn for may have been of none."""
    views = outcome.picture.generations
    return "; ".join(f"{len(view.nodes)} nodes from step {view.first_step}" for view in views) or "no generation"


def happened_at(workdir: Path, step: int) -> float:
    """Return when the fault of a step happened, NaN if it did not."""
    mark = workdir / "out" / mark_of(step)
    return float(json.loads(mark.read_text())["at"]) if mark.exists() else math.nan


def _marked(workdir: Path, name: str) -> str:
    """Return the node that a mark names, "" for none."""
    mark = workdir / "out" / name
    return str(json.loads(mark.read_text()).get("node") or "") if mark.exists() else ""


def _said(events: Sequence[Event], at: float) -> Iterator[Said]:
    for event in events:
        verdict = verdict_of(event)
        if verdict is not None:
            yield replace(verdict, after=event.at - at)


def verdict_of(event: Event) -> Said | None:
    """Return the verdict that an event tells of, at its time by the wall clock; None for all other events."""
    called = _called(event)
    if called is None:
        return None
    fault, act = called
    fields = event.fields
    return Said(
        fault=fault,
        nodes=tuple(fields.get("nodes") or ()),
        ranks=tuple(fields.get("ranks") or ()),
        act=act,
        after=event.at,
        detail=str(fields.get("detail") or ""),
        step=int(fields.get("step", -1)),
        generation=event.generation,
        samples=tuple((int(first), int(stop)) for first, stop in fields.get("samples") or ()),
    )


def _called(event: Event) -> tuple[str, bool] | None:
    """Return what an event calls a fault, and whether anything was done about it; None if it tells of none."""
    fields = event.fields
    match event.name:
        case "rank.stuck" | "training.stalled":
            return str(fields["fault"]), bool(fields.get("act"))
        case "node.slow":
            return SLOW_LINK if fields["kind"] == SlowKind.LINK else str(fields["kind"]), True
        case "memory.short":
            return SHORT, bool(fields["act"])
        case "audit.failed":
            finding = str(fields.get("finding") or "")
            fault = DISPUTED.get(str(fields.get("compared")), finding)
            return fault, finding in (Finding.TRANSIENT, Finding.PERSISTENT)
        case "exam.failed":
            return UNFIT, bool(fields.get("nodes"))
        case "vote.split":
            return SPLIT, bool(fields.get("acted"))
        case "node.lying" if fields.get("compared") == Compared.UPDATE:
            return MISCALCULATED, True
        case "update.wrong":
            return MISCALCULATED, bool(fields.get("acted"))
        case "state.altered":
            return ALTERED, bool(fields.get("acted"))
        case "batch.excluded" if fields.get("detail") != KNOWN:
            return NOT_FINITE, True
        case "run.rolled_back":
            return SPIKED, True
    return None
