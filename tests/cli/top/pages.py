"""Documents of `elastic3d top` without etcd, as its reader makes them."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

from elastic3d.dashboard.document import PageDocument
from elastic3d.dashboard.reading import JobReader
from elastic3d.membership.inspection.derivation import status
from elastic3d.membership.inspection.keys import RunKeys, find
from elastic3d.membership.inspection.status import Status
from tests.cli.status.scenes import ROOT, WALL, Scene
from tests.clocks import HandClock


def document_of(scene: Scene) -> PageDocument:
    """Return what a reader publishes of a scene."""
    documents: list[PageDocument] = []

    def read() -> tuple[Status, RunKeys]:
        run_keys = find(ROOT, scene.items())
        return status("gpt-1b", run_keys, revision=9, remaining=scene.remaining, wall=WALL), run_keys

    JobReader(read, documents.append, clock=HandClock(wall=WALL)).look()
    return documents[0]


def printed(what: RenderableType, width: int, height: int | None = None) -> str:
    """Return what a terminal without colours shows."""
    console = Console(width=width, height=height or 999, file=io.StringIO(), color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
