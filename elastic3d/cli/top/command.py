"""`elastic3d top`: a live job in a terminal, until q or Ctrl-C; elsewhere one picture of it."""

from __future__ import annotations

import json
import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from elastic3d import threads
from elastic3d.cli.job import JobOptions
from elastic3d.cli.top.controls import Controls, Key, KeyReader
from elastic3d.cli.top.nodes import COLUMNS
from elastic3d.cli.top.picture import picture
from elastic3d.cli.top.terminal import PageTerminal
from elastic3d.clock import SYSTEM
from elastic3d.dashboard.document import PageDocument
from elastic3d.dashboard.reading import JobReader
from elastic3d.membership.inspection.jobs import read_job
from elastic3d.values import to_json

SCHEMA = 1
AGING = 1.0
"""Seconds after which the page is drawn again though nothing has changed: it says how old it is."""

LAST_LOOK = 0.5
"""Seconds that the reader of etcd has to end."""


class Shown:
    """The newest document, which a reader's thread leaves for the page's."""

    def __init__(self) -> None:
        self.document: PageDocument | None = None
        self.terminal: PageTerminal | None = None

    def publish(self, document: PageDocument) -> None:
        """Take a document."""
        self.document = document
        if self.terminal is not None:
            self.terminal.wake()


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
    console = Console(highlight=False)
    shown = Shown()
    with options.connect() as (client, job):
        reader = JobReader(lambda: read_job(client, job), shown.publish)
        reader.look()
        assert shown.document is not None
        if as_json:
            print(json.dumps({"schema": SCHEMA, **to_json(shown.document)}, indent=2), flush=True)
            return
        if once or not console.is_terminal or console.is_dumb_terminal:
            console.print(picture(shown.document, Controls(), width=console.width, now=SYSTEM.wall()).page)
            return
        thread = threads.start(reader.run, name="elastic3d-top", edge=threads.Edge.AGAIN)
        try:
            ended = _show(console, shown)
        finally:
            reader.stop()
            thread.join(LAST_LOOK)
    if ended not in (None, signal.SIGINT):
        raise typer.Exit(128 + ended)


def _show(console: Console, shown: Shown) -> signal.Signals | None:
    """Show the page until somebody ends it; return the signal that did, None for a key."""
    controls, reader = Controls(), KeyReader()
    with (
        PageTerminal(sys.stdin) as terminal,
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live,
    ):
        shown.terminal = terminal
        try:
            while terminal.ended is None:
                assert shown.document is not None
                width, height = console.size
                drawn = picture(shown.document, controls, width=width, now=SYSTEM.wall(), height=height)
                live.update(drawn.page, refresh=True)
                for key in reader.read(terminal.wait(AGING)):
                    if key is Key.QUIT:
                        return None
                    controls = controls.pressed(key, columns=len(COLUMNS), pages=drawn.pages)
            return terminal.ended
        finally:
            shown.terminal = None
