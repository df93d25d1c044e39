"""`elastic3d timeline`: a run as a timeline for Perfetto, from the files that its nodes left."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TextIO

import typer

from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.trace import trace
from elastic3d.cli.ckpt.place import complain
from elastic3d.cli.ckpt.render.words import count
from elastic3d.cli.events_folder import EventsFolder, read_run
from elastic3d.cli.goodput import Events, RunId, remarks
from elastic3d.cli.whole_file import STDOUT, whole_file


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
        with whole_file(output, "trace.json") as file:
            number = _write(file, made, read)
    except OSError as error:
        complain(error)
        raise typer.Exit(1) from None
    for remark in remarks(read):
        print(f"elastic3d: {remark}", file=sys.stderr)
    if output != STDOUT:
        print(f"{output}: {count(number, 'event')} of {count(len(read.run.nodes), 'node')}")


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
