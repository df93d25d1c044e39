"""A drawing of one step: what each pipeline rank computes, when, and where it waits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from elastic3d.planner.pipeline_actions import Pass
from elastic3d.planner.timeline import ScheduledAction, Timeline

RANKS = 16
STYLES = {Pass.FORWARD: "cyan", Pass.BACKWARD: "green", Pass.INPUT: "green", Pass.WEIGHT: "magenta"}
SHADES = {Pass.FORWARD: "▒", Pass.BACKWARD: "█", Pass.INPUT: "█", Pass.WEIGHT: "░"}
BESIDE = {Pass.FORWARD: " ", Pass.BACKWARD: "=", Pass.INPUT: "=", Pass.WEIGHT: "-"}
IDLE = "·"


def picture(step: Timeline, width: int) -> RenderableType:
    """Draw a step in `width` columns: with numbers of micro-batches if there is room for them, else in shades."""
    ranks = step.ranks
    label = len(f"  pp {len(ranks) - 1}  ")
    columns = max(8, width - label)
    shortest = min(work.end - work.start for works in ranks for work in works)
    # Every computation takes whole columns, so that none looks longer than others of its kind.
    scale = int(columns / (step.span / shortest)) / shortest
    split = any(work.kind is Pass.INPUT for works in ranks for work in works)
    # The sign beside the number tells halves of a backward from a forward: there must be room for it.
    numbered = scale * shortest >= (2 if split else 1)
    if not numbered:
        scale = columns / step.span
    lines = [
        Text.assemble((f"  pp {rank}".ljust(label), "dim"), _line(works, scale, numbered))
        for rank, works in enumerate(ranks[:RANKS])
    ]
    if len(ranks) > RANKS:
        lines.append(Text(f"  and {len(ranks) - RANKS} more ranks", style="dim"))
    return Group(*lines, _legend(step, numbered))


def _line(works: Sequence[ScheduledAction], scale: float, numbered: bool) -> Text:
    text, column = Text(), 0
    if not numbered:
        return _shaded(works, scale)
    for work in works:
        start, end = round(work.start * scale), round(work.end * scale)
        text.append(IDLE * (start - column), style="dim")
        number = str(work.micro_batch)
        cell = number if len(number) < end - start else number[-1]
        text.append(cell.ljust(end - start, BESIDE[work.kind]), style=STYLES[work.kind])
        column = end
    return text


def _shaded(works: Sequence[ScheduledAction], scale: float) -> Text:
    """Give each column to the kind of work that takes most of it."""
    columns = [dict[Pass, float]() for _ in range(max(1, round(works[-1].end * scale)))]
    for work in works:
        start, end = work.start * scale, work.end * scale
        for column in range(int(start), min(len(columns), int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            kinds = columns[column]
            kinds[work.kind] = kinds.get(work.kind, 0.0) + part
    text = Text()
    for kinds in columns:
        kind = max(kinds, key=lambda one: kinds[one], default=None)
        if kind is None or sum(kinds.values()) < 0.5:
            text.append(IDLE, style="dim")
        else:
            text.append(SHADES[kind], style=STYLES[kind])
    return text


def _legend(step: Timeline, numbered: bool) -> Text:
    text = Text("  ", style="dim")
    kinds = {work.kind for works in step.ranks for work in works}
    words = {
        Pass.FORWARD: "forward",
        Pass.BACKWARD: "backward",
        Pass.INPUT: "gradients of inputs",
        Pass.WEIGHT: "gradients of weights",
    }
    for kind, word in words.items():
        if kind in kinds:
            text.append(f"1{BESIDE[kind]}".strip() if numbered else SHADES[kind], style=STYLES[kind])
            text.append(f" {word}  ")
    text.append(f"{IDLE} waiting: bubble {step.bubble:.1%}")
    if step.micro_batches < step.of:
        text.append(f"; drawn for {step.micro_batches} micro-batches of {step.of}")
    return text
