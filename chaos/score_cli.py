"""`elastic3d chaos score`: how well the runtime finds what holds a job up."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chaos.growth.cli import soak
from chaos.inject_cli import inject
from chaos.list_cli import list_faults
from chaos.random_cli import play_random
from chaos.report.command import report
from chaos.score.card import Row, card
from chaos.score.kinds import KINDS
from chaos.score.results import Result
from chaos.series import EACH, draw, play_all, steps_of
from chaos.shrink_cli import shrink_schedule
from chaos.storm_cli import replay, run_schedule
from chaos.watching import clean_end
from elastic3d.cli.job import about_a_job
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.values import to_json

SCHEMA = 1
app = typer.Typer(
    name="chaos",
    help="Break real jobs on this machine, and judge what becomes of them; or a live one, if it allows that.",
    no_args_is_help=True,
)
app.callback()(lambda: None)
app.command("list")(list_faults)
app.command("run")(run_schedule)
app.command()(replay)
app.command()(about_a_job(inject))
app.command()(report)
app.command("random")(play_random)
app.command("shrink")(shrink_schedule)
app.command()(soak)


@app.command()
def score(
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help=f"What to try: {', '.join(KINDS)}. May be repeated; default: all.", show_default=False
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="How often to try each kind.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of ranks, steps and layouts.")] = 1,
    nodes: Annotated[int, typer.Option(min=2, max=4, help="Most nodes of a job.")] = 4,
    each: Annotated[int, typer.Option(min=1, help="Most faults of one job, one after another.")] = EACH,
    lanes: Annotated[int, typer.Option(min=1, help="Jobs at a time.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Keep logs, events and evidence here. Default: nowhere.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Fail ranks of real jobs in known ways, and count what is found: which class, which node, how soon, which bits.

    Jobs are of torchrun agents on this machine, as in the demo; each meets several faults one after another. The exit
    code is 0 only if every class has a precision of 1, a recall of 0.99, the right node in 98 %, and all jobs end with
    the bits of an undisturbed one. What this machine cannot try, for lack of rights, is shown as skipped. Nothing is
    left behind, after Ctrl-C neither.

    Examples:

        elastic3d chaos score --kind stop --kind stall

        elastic3d chaos score -n 20 --json > card.json
    """
    console = Console(stderr=as_json)
    try:
        for kind in kinds or ():
            if kind not in KINDS:
                raise UsageError(f"--kind {kind!r}: give one of {', '.join(KINDS)}")
        drawn = draw(dict.fromkeys(kinds or KINDS, count), seed, each=each, most=nodes)
        with ExitStack() as stack:
            stack.enter_context(clean_end())
            workdir = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-score-")))
            results = play_all(
                drawn,
                workdir=workdir,
                steps=steps_of(each),
                lanes=lanes,
                heard=lambda result: console.print(line(result)),
            )
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    rows = card(results)
    if as_json:
        print(json.dumps(document(rows, results)))
    else:
        console.print(table(rows))
    raise typer.Exit(0 if all(row.passed or not row.trials for row in rows) else 1)


def line(result: Result) -> str:
    """Return what became of one trial in one line."""
    if result.skipped:
        return f"{result.trial}: skipped, {result.skipped}"
    first = result.first
    said = f"{first.fault} on {', '.join(first.nodes) or 'nobody'} after {first.after:.1f} s" if first else "nothing"
    bits = "same bits" if result.same_bits else "OTHER BITS"
    back = "" if math.isnan(result.recovered) else f", next step after {result.recovered:.1f} s"
    broken = "".join(f"\n    {text}" for text in result.broken)
    return f"{result.trial}: {said}{back}; {bits}{broken}"


def table(rows: tuple[Row, ...]) -> Table:
    """Return the card for a terminal."""
    shown = Table(box=None)
    for name in (
        "kind",
        "jobs",
        "precision",
        "recall",
        "culprit",
        "p50",
        "p95",
        "bar",
        "next step",
        "lost",
        "same bits",
    ):
        shown.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows:
        style = "" if row.passed else "bold red" if row.trials else "yellow"
        shown.add_row(
            row.kind,
            str(row.trials),
            f"{row.precision:.2f}",
            f"{row.recall:.2f}",
            f"{row.culprits:.2f}",
            *(_seconds(value) for value in (row.p50, row.p95)),
            f"{row.bar:.0f} s" if row.bar else "none",
            _seconds(row.recovered_p50),
            str(row.steps_lost),
            f"{row.same_bits} of {row.trials}" if row.trials else "skipped",
            style=style,
        )
    return shown


def document(rows: tuple[Row, ...], results: tuple[Result, ...]) -> dict[str, Any]:
    """Return the card as `--json` prints it. Numbers that were not measured are null."""
    shown = [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in to_json(row).items()
        }
        | {"passed": row.passed}
        for row in rows
    ]
    return {"schema": SCHEMA, "rows": shown, "jobs": [result.document() for result in results]}


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1f} s"
