"""`elastic3d chaos list`: the catalogue of faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chaos.faults.catalogue import KINDS, form, lacking, summary
from chaos.faults.fault import Fault, Place
from chaos.report.watching import clean_end
from chaos.schedules.restart import WORDS as RESTART_WORDS
from elastic3d.membership.injection import INJECTABLE
from elastic3d.values import to_json

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDocument:
    """One kind of fault as `--json` prints it.

    happens: in a sentence. enters: by which seam. promised: what holds then. page: of the documentation, and `row`, of
    the table of failures on it, "" on others. detector: the event that says so, "" where nobody may say anything.
    bar: seconds until it is said, null for none. needs: beside a machine and a job. missing: which of that this machine
    has not, "" for nothing. replay: how exactly it happens again. form: its lines in a schedule.
    live: whether `elastic3d chaos inject` can inject it into a live job. restart: whether a job under `--mode restart`
    can meet it.
    """

    word: str
    place: str
    happens: str
    enters: str
    promised: str
    page: str
    row: str
    detector: str
    bar: float | None
    needs: tuple[str, ...]
    missing: str
    replay: str
    form: str
    live: bool
    restart: bool


def list_faults(
    places: Annotated[
        list[Place] | None,
        typer.Option("--place", help="Show faults that enter there only. May be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show every fault that can be made: where it enters, what is promised then, who notices it, what it needs.

    What this machine lacks for a fault is shown with it; a schedule that has it is played without it, and says so.

    Examples:

        elastic3d chaos list

        elastic3d chaos list --place etcd --place store

        elastic3d chaos list --json
    """
    with clean_end():
        # What this machine can make is tried, and has to be undone.
        shown = [document(kind) for kind in KINDS.values() if not places or kind.ABOUT.place in places]
    if as_json:
        print(json.dumps({"schema": SCHEMA, "faults": [to_json(one) for one in shown]}))
    else:
        Console().print(table(shown))


def document(kind: type[Fault]) -> FaultDocument:
    """Return what the catalogue says of a kind."""
    about = kind.ABOUT
    return FaultDocument(
        word=kind.WORD,
        place=about.place.value,
        happens=summary(kind),
        enters=about.enters,
        promised=about.promised,
        page=about.page,
        row=about.row,
        detector=about.detector,
        bar=about.bar or None,
        needs=tuple(sorted(need.value for need in about.needs)),
        missing="; ".join(filter(None, (lacking(need) for need in sorted(about.needs)))),
        replay=about.replay.value,
        form=form(kind),
        live=kind.WORD in INJECTABLE,
        restart=kind.WORD in RESTART_WORDS,
    )


def table(shown: Sequence[FaultDocument]) -> Table:
    """Return the catalogue for a terminal, of 80 columns as of more: the word of a fault is never cut nor wrapped."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    place = ""
    for one in shown:
        if one.place != place:
            place = one.place
            made.add_row(Text(place, style="bold"))
        made.add_row(f"  {one.word}", _told(one))
    return made


def _told(one: FaultDocument) -> Text:
    """Return what is said of a kind: what happens, what is promised then, and a line with the rest."""
    text = Text(f"{one.happens}\n")
    text.append(f"Promised: {one.promised}.\n", "dim")
    within = f" within {one.bar:g} s" if one.bar else ""
    text.append(f"Noticed by {one.detector}{within}." if one.detector else "Noticed by nobody.", "dim")
    if one.needs:
        text.append(f" Needs {', '.join(one.needs)}.", "yellow")
    if one.live:
        text.append(" Also into a live job.", "green")
    if one.restart:
        text.append(" Also under --mode restart.", "green")
    if one.missing:
        text.append(f"\nNot on this machine: {one.missing}", "red")
    return text


def page() -> str:
    """Return the catalogue as a page of the reference."""
    lines = [
        "# Faults",
        "",
        "What `elastic3d chaos` can do to a job: what `elastic3d chaos list` shows, written from the code by",
        "`make reference`. How to use it: [Breaking your own training](../guides/chaos.md). What is here",
        "can be made. *Exact*: it happens at the same place of the program again. *Near*: after the same event, some",
        "milliseconds after it is seen. *Timed*: it also lasts for real seconds, which no replay repeats exactly.",
        "*Live*: `elastic3d chaos inject` can also inject it into a live job that allows it. *Restart*: a script under",
        "`--mode restart` can meet it, too; what is promised there is in the guide.",
    ]
    for place in Place:
        lines += ["", f"## {place.value.capitalize()}", "", "| fault | what happens, and how it enters |"]
        lines[-1] += " what is promised | noticed by | needs | again |"
        lines += ["|---|---|---|---|---|---|"]
        lines += [_row(document(kind)) for kind in KINDS.values() if kind.ABOUT.place is place]
    lines += ["", "## In a schedule", "", "With every value that it may have, at its default where there is one:", ""]
    lines += ["```toml", *(line for kind in KINDS.values() for line in _block(kind)), "```"]
    return "\n".join(lines) + "\n"


def _row(one: FaultDocument) -> str:
    marks = ", ".join(mark for mark, has in (("live", one.live), ("restart", one.restart)) if has)
    link = f"[promise]({'failures.md' if one.row else '../' + one.page})"
    cells: list[Any] = [
        f"`{one.word}`{f' ({marks})' if marks else ''}",
        f"{one.happens} By {one.enters}.",
        f"{one.promised} ({link})",
        f"`{one.detector}`{f' within {one.bar:g} s' if one.bar else ''}" if one.detector else "nobody",
        ", ".join(one.needs),
        one.replay,
    ]
    return f"| {' | '.join(cells)} |"


def _block(kind: type[Fault]) -> list[str]:
    return ["[[fault]]", *form(kind).split(", "), ""]
