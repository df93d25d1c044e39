"""`elastic3d goodput`: where the time of a run's nodes went, from the files that they left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from elastic3d.accounting.goodput import GenerationGoodput, Goodput, NodeGoodput, goodput, missing
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.past_run import ACCOUNTED
from elastic3d.accounting.spans import Category
from elastic3d.cli.ckpt.place import Json, complain
from elastic3d.cli.ckpt.render.words import count, percent
from elastic3d.cli.events_folder import EventsFolder, others_said, read_run
from elastic3d.cli.goodput_words import held_time, most_lost, spelled, spelled_parts, useful_share, why
from elastic3d.cli.render import clean
from elastic3d.values import to_json

SCHEMA = 1
MOST = 20
"""Generations and nodes that are listed for a person; the document has all."""

BAR = 30
_STYLES = {Category.USEFUL: "green", Category.SPARE: "cyan", Category.AWAY: "dim", Category.UNKNOWN: "dim"}

Events = Annotated[
    Path,
    typer.Argument(metavar="EVENTS", help="The folder with the event files of all nodes.", show_default=False),
]
RunId = Annotated[
    str,
    typer.Option(
        "--id", metavar="ID", help="Which run, if the folder has several. Default: the newest.", show_default=False
    ),
]


def show_goodput(events: Events, run_id: RunId = "", as_json: Json = False) -> None:
    """Account for the time of a run's nodes: what went to steps that count, and what each failure and change cost.

    Read from the event files of `elastic3d.run(events=...)`, which have to lie in one folder; the run may be over or
    still going on. From its first event to its last, each microsecond of each node is in exactly one category. What is
    spent from the last step of a generation to the first of the next one belongs to the next one's cause, and so do
    steps that are made again.

    Examples:

        elastic3d goodput /data/gpt-1b/events

        elastic3d goodput /data/gpt-1b/events --json | jq .effective_training_time_ratio
    """
    try:
        read = read_run(events, run_id, ACCOUNTED)
        account = goodput(
            read.run_id,
            read.run,
            node_spans(read.run),
            read.clocks,
            other_runs=read.others,
            remarks=remarks(read),
        )
        if as_json:
            print(json.dumps({"schema": SCHEMA, **to_json(account)}, indent=2), flush=True)
        else:
            Console(highlight=False).print(_picture(account))
    except OSError as error:
        complain(error)
        raise typer.Exit(1) from None


def _picture(account: Goodput) -> RenderableType:
    ratio = account.effective_training_time_ratio
    parts: list[RenderableType] = [
        Text.assemble(
            (clean(account.run), "bold"),
            f"  {count(len(account.nodes), 'node')}, {spelled(account.microseconds)}, {count(account.steps, 'step')}",
        ),
        Text(
            f"goodput {percent(account.goodput, 1)} of {spelled(account.held)} that nodes were held; "
            f"effective training time ratio {percent(ratio, 1)}"
        ),
        Text(),
        _categories(account.by_category, account.held),
    ]
    costly = sorted(account.generations, key=lambda one: -one.microseconds)[:MOST]
    chosen = [one for one in account.generations if one in costly]
    if chosen:
        parts += [Text(), _generations(chosen, account.held)]
        if len(chosen) < len(account.generations):
            parts.append(Text(f"and {len(account.generations) - len(chosen)} more, which cost less; --json has all"))
    poor = sorted(account.nodes, key=useful_share)[:MOST]
    parts += [Text(), _nodes([one for one in account.nodes if one in poor])]
    if len(poor) < len(account.nodes):
        parts.append(Text(f"and {len(account.nodes) - len(poor)} more, with a larger useful share; --json has all"))
    if account.remarks:
        parts += [Text(), *(Text(clean(f"- {remark}"), style="yellow") for remark in account.remarks)]
    return Group(*parts)


def _categories(by_category: Mapping[Category, int], held: int) -> Table:
    table = Table("node-time", "", "", "", box=None)
    table.columns[2].justify = table.columns[3].justify = "right"
    for category in Category:
        spent = by_category[category]
        if spent:
            away = category is Category.AWAY
            style = _STYLES.get(category, "red")
            drawn = Text() if away else Text(_drawn(spent, held), style=style)
            share = "-" if away else percent(spent, held)
            table.add_row(Text(category.value), drawn, share, spelled(spent))
    return table


def _drawn(part: int, whole: int) -> str:
    """Return a bar in eighths of a character, never empty."""
    eighths = max(1, round(part / whole * BAR * 8)) if whole else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _generations(generations: list[GenerationGoodput], held: int) -> Table:
    table = Table("generation", "why", "cost", "", "of which", box=None)
    table.columns[2].justify = table.columns[3].justify = "right"
    table.columns[1].overflow = table.columns[4].overflow = "fold"
    for one in generations:
        parts = ", ".join(spelled_parts(one.by_category))
        if one.steps_repeated:
            parts += f" ({count(one.steps_repeated, 'step')} made again)"
        table.add_row(
            str(one.number), Text(clean(why(one))), spelled(one.microseconds), percent(one.microseconds, held), parts
        )
    return table


def _nodes(nodes: list[NodeGoodput]) -> Table:
    table = Table("node", "held", "useful", "lost most to", box=None)
    table.columns[1].justify = table.columns[2].justify = "right"
    for one in nodes:
        table.add_row(
            Text(clean(one.node)),
            spelled(held_time(one)),
            percent(one.by_category[Category.USEFUL], held_time(one)),
            most_lost(one),
        )
    return table


def remarks(read: EventsFolder) -> list[str]:
    """Return what people should know of what was read: what is not there, clocks that differ, other runs."""
    lines = [*read.remarks, *missing(read.run, read.clocks)]
    for clock in read.clocks:
        if clock.ahead:
            where = "ahead of" if clock.ahead > 0 else "behind"
            lines.append(
                f"the clock of {clock.node} is {spelled(abs(clock.ahead))} {where} others; that is set right here"
            )
    if read.others:
        lines.append(others_said(read.others))
    return lines
