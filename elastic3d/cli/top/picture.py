"""The page of `elastic3d top`, for a terminal of any size: a value in, a picture out.

Every line is cut to the width, so that what is above and below the nodes is known, and they get the rest of the height.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.cli.ckpt.render.words import count
from elastic3d.cli.durations import spell
from elastic3d.cli.render import JOB_STYLES, clean, goodput, when
from elastic3d.cli.top.controls import Controls
from elastic3d.cli.top.nodes import COLUMNS, GAP, Column, NodeRow, fitting, in_order, node_rows
from elastic3d.dashboard.document import PageDocument
from elastic3d.membership.inspection.status import JobState

GENERATIONS, FINDINGS, WARNINGS = 4, 3, 4
"""Most lines of each below the nodes on a screen; in a plain picture five times as many."""

PLAIN = 5

FEWEST = 3
"""Rows of nodes for which the generations and findings make room."""

TITLE = "bold"
"""Style of what stands above some lines."""

OLD = 15.0
"""Seconds after which what is shown is old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A page, and how many pages the nodes take."""

    page: RenderableType
    pages: int


def picture(
    document: PageDocument, controls: Controls, *, width: int, now: float, height: int | None = None
) -> Picture:
    """Return the page at wall time `now`. height: lines of the screen, None for a picture as long as it gets."""
    room = 1 if height is not None else PLAIN
    head = [*_head(document, now), *_warnings(document, WARNINGS * room)]
    rows = in_order(node_rows(document), COLUMNS[controls.sort % len(COLUMNS)], reverse=controls.reverse)
    below = [*_findings(document, FINDINGS * room), *_generations(document, GENERATIONS * room, now)]
    per_page = max(1, len(rows))
    if height is not None:
        # Title and footer, and a line above the nodes.
        free = height - len(head) - 3
        below = below[: max(0, free - min(FEWEST, len(rows)))]
        while below and (not below[-1].plain or below[-1].style == TITLE):
            below.pop()
        per_page = max(1, free - len(below))
    pages = max(1, -(-len(rows) // per_page))
    page = min(controls.page, pages - 1)
    shown = rows[page * per_page : (page + 1) * per_page]
    parts: list[RenderableType] = [*head, Text(), _nodes(shown, controls, width)]
    parts += below
    if height is not None:
        used = len(head) + 2 + len(shown) + len(below)
        parts += [Text()] * max(0, height - 1 - used)
        parts.append(_footer(controls, page, pages))
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Picture(page=Group(*parts), pages=pages)


def _head(document: PageDocument, now: float) -> list[Text]:
    status = document.status
    state = (str(status.state), JOB_STYLES.get(status.state, "yellow"))
    lines = [Text.assemble((clean(status.run_id), "bold"), "  ", state)]
    if status.detail:
        lines[0].append(f": {clean(status.detail)}")
    lines.append(_asked(document, now))
    generation, sealed = status.generation, document.moments.get("sealed")
    if generation is not None:
        why = f"{generation.cause}: {generation.detail}" if generation.detail else str(generation.cause)
        line = Text.assemble((f"generation {generation.number}", "bold"))
        if sealed is not None:
            line.append(f", sealed {spell(max(0.0, now - sealed))} ago")
        layout = f", {generation.layout}" if generation.layout is not None else ""
        line.append(f"{layout}, {count(len(generation.nodes), 'node')} ({clean(why)})")
        lines.append(line)
    if status.preparing is not None:
        coming = status.preparing
        lines.append(Text(clean(f"generation {coming.number} is being prepared ({coming.cause})"), style="yellow"))
    lines.append(_progress(document))
    kept = [
        f"{name} step {one.step}, {spell(max(0.0, now - document.moments.get(name, now)))} ago"
        for name, one in (
            *(("snapshot", status.snapshot), ("checkpoint", status.checkpoint)),
            *(("verified", status.verified), ("vetted", status.vetted)),
        )
        if one is not None
    ]
    if kept:
        lines.append(Text("; ".join(kept)))
    if status.goodput is not None:
        lines.append(Text(goodput(status.goodput)))
    return lines


def _asked(document: PageDocument, now: float) -> Text:
    """Say how old all of this is, and why it is old if etcd is away."""
    age = max(0.0, now - document.read_at)
    if document.away:
        text = f"as of {spell(age)} ago, since etcd does not show it now: {document.away}"
        return Text(clean(text), style="bold red")
    leader = f", {clean(document.status.leader)} leads" if document.status.leader else ""
    return Text(f"as of {spell(age)} ago{leader}", style="yellow" if age > OLD else "dim")


def _progress(document: PageDocument) -> Text:
    status = document.status
    if status.step < 0:
        return Text("no step was reported yet" if status.state is not JobState.ENDED else "")
    of = f" of {status.until}" if status.until else ""
    text = Text.assemble((f"step {status.step}{of}", "bold"))
    took = seconds_a_step(document)
    if took > 0:
        text.append(f", {1 / took:.3g} steps/s")
    if status.loss is not None:
        text.append(f", loss {status.loss:.5g}")
    if took > 0 and status.until > status.step and status.state is JobState.TRAINING:
        text.append(f", {spell((status.until - status.step) * took)} left")
    return text


def seconds_a_step(document: PageDocument) -> float:
    """Return how long a step takes: the mean of those of this generation that were reported last, 0 for none."""
    status = document.status
    number = status.generation.number if status.generation is not None else 0
    lately = [one.seconds for one in document.newest if one.generation == number and one.seconds > 0]
    return statistics.fmean(lately) if lately else max(0.0, status.step_seconds)


def _warnings(document: PageDocument, most: int) -> list[Text]:
    status = document.status
    lines = [
        f"rank {one.rank} ({one.node}) makes no progress in {one.phase}, {one.state}, for {spell(one.seconds)} or more"
        for one in status.suspects
    ]
    if status.health is not None:
        lines += [f"node {one.node} is slow since step {one.since}: {one.detail}" for one in status.health.slow]
    if status.injectable:
        lines.append(f"faults may be injected into {count(len(status.injectable), 'node')} (chaos=allow)")
    lines += [f"key that cannot be read: {problem}" for problem in status.problems]
    shown = lines if len(lines) <= most else [*lines[: most - 1], f"and {len(lines) - most + 1} more"]
    return [Text(clean(line), style="bold red" if line.startswith("rank") else "yellow") for line in shown]


def _nodes(rows: Sequence[NodeRow], controls: Controls, width: int) -> Table:
    chosen = COLUMNS[controls.sort % len(COLUMNS)]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
    widths = fitting(rows, width)
    columns = [column for column in COLUMNS if column.name in widths]
    for column in columns:
        table.add_column(
            _title(column, chosen, controls),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=widths[column.name],
        )
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def _title(column: Column, chosen: Column, controls: Controls) -> str:
    return column.name + (("▾" if controls.reverse else "▴") if column is chosen else "")


def _generations(document: PageDocument, most: int, now: float) -> list[Text]:
    if not document.generations:
        return []
    lines = [Text(), Text("generations", style=TITLE)]
    for history in document.generations[:most]:
        moved = " ".join([*(f"+{name}" for name in history.joined[:8]), *(f"-{name}" for name in history.left[:8])])
        spares = f" + {history.spares}" if history.spares else ""
        said = ", ".join(filter(None, (f"{history.active}{spares} nodes", moved, history.layout)))
        detail = f": {history.detail}" if history.detail else ""
        lines.append(Text(clean(f"{history.number}  {when(history.at, now)}  {history.cause}{detail}  ({said})")))
    return lines


def _findings(document: PageDocument, most: int) -> list[Text]:
    if not document.findings:
        return []
    lines = [Text(), Text("found (elastic3d explain tells all)", style=TITLE)]
    lines += [Text(clean(f"{one.generation}  {one.title}")) for one in document.findings[:most]]
    return lines


def _footer(controls: Controls, page: int, pages: int) -> Text:
    chosen = COLUMNS[controls.sort % len(COLUMNS)].name
    keys = f"q quit   s/S sort: {chosen}   r reverse"
    return Text(f"{keys}   ←/→ page {page + 1} of {pages}" if pages > 1 else keys, style="reverse")
