"""The page of `elastic3d top` in a terminal, until somebody ends it, or one picture of it."""

from __future__ import annotations

import signal
import sys

from rich.console import Console
from rich.live import Live

from elastic3d import threads
from elastic3d.cli.top.controls import Controls, Key, KeyReader
from elastic3d.cli.top.nodes import COLUMNS
from elastic3d.cli.top.picture import picture
from elastic3d.cli.top.terminal import PageTerminal
from elastic3d.clock import SYSTEM
from elastic3d.dashboard.document import PageDocument
from elastic3d.dashboard.reading import JobReader

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


def print_once(console: Console, shown: Shown) -> None:
    """Print a picture of what was seen."""
    assert shown.document is not None
    console.print(picture(shown.document, Controls(), width=console.width, now=SYSTEM.wall()).page)


def follow(console: Console, shown: Shown, reader: JobReader) -> signal.Signals | None:
    """Show the page, and look again and again; return as `show`."""
    thread = threads.start(reader.run, name="elastic3d-top", edge=threads.Edge.AGAIN)
    try:
        return show(console, shown)
    finally:
        reader.stop()
        thread.join(LAST_LOOK)


def show(console: Console, shown: Shown) -> signal.Signals | None:
    """Show the page until somebody ends it; return the signal that did, None for a key."""
    controls, keys = Controls(), KeyReader()
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
                for key in keys.read(terminal.wait(AGING)):
                    if key is Key.QUIT:
                        return None
                    controls = controls.pressed(key, columns=len(COLUMNS), pages=drawn.pages)
            return terminal.ended
        finally:
            shown.terminal = None
