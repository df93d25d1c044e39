"""The two ways in which every command answers: a display for a person, or one JSON document for a program."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from checkpointing import Store
from elastic3d.cli.ckpt.documents import CheckpointDocument
from elastic3d.values import to_json

SCHEMA = 1


def tell(store: Store, data: CheckpointDocument, picture: Callable[[int], RenderableType], *, as_json: bool) -> None:
    """Print a result, as `data` in JSON or as its picture for a terminal of some width."""
    if as_json:
        print_json(store, data)
    else:
        console = Console(highlight=False)
        console.print(picture(console.width))


def print_json(store: Store, data: CheckpointDocument) -> None:
    """Print one document; numbers that JSON cannot express are strings: "inf", "-inf", "nan"."""
    print(json.dumps(document(store.url, data), indent=2, allow_nan=False))


def document(url: str, data: CheckpointDocument) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {"schema": SCHEMA, "store": url, **plain(to_json(data))}


def plain(value: Any) -> Any:
    """Return a value for JSON, in which numbers that JSON cannot express are strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


class Advance(Protocol):
    """Takes reports of progress."""

    def __call__(self, done: int, total: int | None = None) -> None:
        """Take the amount done, and the total if known."""
        ...


@contextmanager
def bar(what: str, *, total: int | None = None, in_bytes: bool = True) -> Iterator[Advance]:
    """Show a bar on standard error while something long runs; nothing unless that is a terminal."""
    amounts = (DownloadColumn(binary_units=True), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    hidden = not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int, total: int | None = None) -> None:
            if total is None:
                progress.update(task, completed=done)
            else:
                progress.update(task, completed=done, total=total)

        yield advance
