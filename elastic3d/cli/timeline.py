"""`elastic3d timeline`: a run as a timeline for Perfetto, from the files that its nodes left."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.trace import trace
from elastic3d.cli.ckpt.place import complain
from elastic3d.cli.ckpt.render.words import count
from elastic3d.cli.events_folder import EventsFolder, read_run
from elastic3d.cli.goodput import Events, RunId, remarks
from elastic3d.errors import UsageError

STDOUT = "-"


def show_timeline(
    events: Events,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help='Where to write it; "-" for standard output.')
    ] = "trace.json",
    run_id: RunId = "",
) -> None:
    """Write a run as a timeline that https://ui.perfetto.dev and chrome://tracing open.

    Generations, recoveries and their parts, steps, checkpoints and snapshots, what each node's time went to, and all
    else that was written down; nodes whose clocks differ are put on one. Nothing is sent anywhere: the page of Perfetto
    reads the file in the browser. A file that is there is replaced when the new one is whole.

    Examples:

        elastic3d timeline /data/gpt-1b/events -o trace.json

        elastic3d timeline /data/gpt-1b/events -o - | gzip > trace.json.gz
    """
    try:
        read = read_run(events, run_id)
        made = trace(read.run, node_spans(read.run))
        number = _write(sys.stdout, made, read) if output == STDOUT else _replace(Path(output), made, read)
    except OSError as error:
        complain(error)
        raise typer.Exit(1) from None
    for remark in remarks(read):
        print(f"elastic3d: {remark}", file=sys.stderr)
    if output != STDOUT:
        print(f"{output}: {count(number, 'event')} of {count(len(read.run.nodes), 'node')}")


def _replace(path: Path, made: Iterable[Mapping[str, Any]], read: EventsFolder) -> int:
    """Write a file that is whole, or none. What is no file, as a pipe or a device, is written to as it is."""
    if path.is_dir():
        raise UsageError(f"--output {str(path)!r} is a folder; give a file, such as {str(path / 'trace.json')!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.exists() and not path.is_file():
        with path.open("w") as pipe:
            return _write(pipe, made, read)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w") as file:
            number = _write(file, made, read)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return number


def _write(file: TextIO, made: Iterable[Mapping[str, Any]], read: EventsFolder) -> int:
    """Write the trace, an event a line; return how many there are."""
    about = {
        "run": read.run_id,
        "first": read.run.first / 1e6,
        "clocks": {clock.node: clock.ahead for clock in read.clocks},
    }
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [')
    number = 0
    for number, one in enumerate(made, start=1):
        file.write(("\n" if number == 1 else ",\n") + json.dumps(one, separators=(",", ":")))
    file.write("\n]}\n")
    file.flush()
    return number
