"""`elastic3d top`: a live job in a terminal, until q or Ctrl-C; elsewhere one picture of it.

What it shows is imported when it is asked for: the dashboard's document is made of what commands print, too.
"""

from __future__ import annotations

import json
import signal
from typing import Annotated

import typer
from rich.console import Console

from elastic3d.cli.job import JobOptions
from elastic3d.membership.inspection.jobs import read_job
from elastic3d.values import to_json

SCHEMA = 1


def top(
    options: JobOptions,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is shown as one JSON document.")] = False,
) -> None:
    """Show a live job on one page that keeps itself up to date: progress, nodes, goodput, generations, findings.

    For those who sit at a terminal that reaches etcd; `elastic3d dashboard` shows the same in a browser. Keys: q or
    Ctrl-C ends it, s and S choose the column by which nodes stand, r turns their order round, the arrow keys turn
    pages. The page says how old it is, and while etcd is away it keeps what was seen. Where the output is no terminal,
    one picture is printed. Etcd is read once a second, and the nodes are not asked.

    Examples:

        elastic3d top --endpoint e1:2379,e2:2379 --id gpt-1b

        elastic3d top --once | head -20

        elastic3d top --json | jq .status.goodput
    """
    from elastic3d.cli.top.showing import Shown, follow, print_once
    from elastic3d.dashboard.reading import JobReader

    console, shown = Console(highlight=False), Shown()
    with options.connect() as (client, job):
        reader = JobReader(lambda: read_job(client, job), shown.publish)
        reader.look()
        if as_json:
            print(json.dumps({"schema": SCHEMA, **to_json(shown.document)}, indent=2), flush=True)
            return
        if once or not console.is_terminal or console.is_dumb_terminal:
            print_once(console, shown)
            return
        ended = follow(console, shown, reader)
    if ended not in (None, signal.SIGINT):
        raise typer.Exit(128 + ended)
