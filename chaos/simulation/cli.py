"""`elastic3d simulate`: the production code under a virtual clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from chaos.commits.cli import commits
from chaos.goodput.cli import goodput
from chaos.many import cli as many_cli
from chaos.simulation.large import Account, form
from chaos.simulation.run import play, play_many
from chaos.simulation.schedule import parse
from chaos.simulation.trace import UNITS, read_trace, scaled
from elastic3d.errors import Elastic3dError, UsageError

app = typer.Typer(name="simulate", help="Simulate parts of a job under a virtual clock.", no_args_is_help=True)
app.callback()(lambda: None)
app.command()(commits)
app.command()(goodput)


@app.command()
def membership(
    nodes: Annotated[int | None, typer.Option(help="Nodes of the job; with --trace, its peak. Default: 100.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random: delays, deaths, arrivals.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(help="A file of `seconds,nodes held` rows, with the counts before and after each change."),
    ] = None,
    unit: Annotated[str | None, typer.Option("--unit", help=UNITS, show_default=False)] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Minutes of the trace to play, from its beginning. Default: all of it.")
    ] = None,
    schedules: Annotated[
        int | None, typer.Option(help="Play so many small jobs with random faults instead of one large job.")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Play the schedule in this file, as a failure prints it, instead of one large job."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Form, break and re-form a job of any number of nodes, as the real state machine does it, in virtual time.

    Without --trace the nodes start within a second; then some die, some join, one drains. The exit code is 1 if
    anything happened that must not.

    Examples:

        elastic3d simulate membership --nodes 10000 --seed 3

        elastic3d simulate membership --trace spot.csv --json > formations.json

        elastic3d simulate membership --schedules 2000

        elastic3d simulate membership --replay failure.txt
    """
    console = Console(stderr=True)
    try:
        large = any(given is not None for given in (nodes, trace, unit, minutes))
        if replay is not None:
            if large or schedules is not None or as_json:
                raise UsageError("--replay: it goes with no other option")
            kept = many_cli.replay(replay, lambda text: play(parse(text)))
        elif schedules is not None:
            if large:
                raise UsageError("--schedules: it goes with --seed and --json alone")
            kept = many_cli.play_and_tell(play_many, schedules, seed, as_json=as_json)
        else:
            kept = _large(nodes, seed, trace, unit, minutes, as_json, console)
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if kept else 1)


def _large(
    nodes: int | None,
    seed: int,
    trace: Path | None,
    unit: str | None,
    minutes: float | None,
    as_json: bool,
    console: Console,
) -> bool:
    if nodes is not None and nodes < 1:
        raise UsageError(f"--nodes {nodes}: give 1 or more")
    if minutes is not None and (trace is None or not minutes > 0):
        raise UsageError(f"--minutes {minutes:g}: it needs a --trace, and more than 0")
    if unit is not None and trace is None:
        raise UsageError(f"--unit {unit}: it needs a --trace")
    changes = read_trace(trace, unit).changes if trace is not None else ()
    if changes and nodes is not None:
        changes = scaled(changes, nodes)
    most = max((change.nodes for change in changes), default=nodes or 100)
    with _progress(console) as progress:
        task = progress.add_task(f"{most} nodes", total=None)

        def report(now: float, formations: int) -> None:
            progress.update(task, description=f"{most} nodes, {now:.1f} virtual seconds, {formations} formations")

        account = form(most, seed, trace=changes, minutes=minutes, report=report)
    if as_json:
        print(
            json.dumps(
                {
                    "formations": [asdict(formation) for formation in account.formations],
                    "largest_record_bytes": account.largest_record_bytes,
                    "violations": list(account.violations),
                }
            )
        )
    else:
        _show(account)
    return not account.violations


def _show(account: Account) -> None:
    table = Table("generation", "cause", "nodes", "seconds", "etcd operations", "etcd bytes", box=None)
    for column in table.columns:
        column.justify = "left" if column.header == "cause" else "right"
    for one in account.formations:
        size = f"{one.etcd_bytes:,}"
        table.add_row(
            str(one.generation), one.cause, str(one.nodes), f"{one.seconds:.3f}", f"{one.etcd_operations:,}", size
        )
    console = Console()
    console.print(table)
    console.print(f"largest record: {account.largest_record_bytes:,} bytes; {account.virtual:.1f} virtual seconds")
    for violation in account.violations:
        console.print(f"violation {violation}", markup=False, highlight=False)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress
