"""`elastic3d report`: a page about what became of a run, from the files that its nodes left."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from elastic3d.cli.ckpt.place import Json, complain
from elastic3d.cli.ckpt.render.words import size
from elastic3d.cli.events_folder import read_run
from elastic3d.cli.goodput import Events, RunId, remarks
from elastic3d.cli.whole_file import STDOUT, whole_file
from elastic3d.clock import SYSTEM
from elastic3d.health.past_verdicts import read_bundles
from elastic3d.values import to_json

SCHEMA = 1
OUTPUT = "report.html"


def write_report(
    events: Events,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help='Where to write it; "-" for standard output.',
            show_default=OUTPUT,
        ),
    ] = "",
    run_id: RunId = "",
    as_json: Json = False,
) -> None:
    """Write one HTML page about what became of a run: curves, nodes, time, generations, findings, checkpoints.

    The page is made of the event files of `elastic3d.run(events=...)` alone, and of the evidence beside them; the run
    may be over or still going on. It loads nothing, has no script, and can be kept or sent as one file. Lines that
    cannot be read count as not written, and the page says how many there are. A file that is there is replaced when the
    new one is whole. With --json the same is printed as one document, and the page is written only where --output names
    a file.

    Examples:

        elastic3d report /data/gpt-1b/events

        elastic3d report /data/gpt-1b/events -o gpt-1b.html

        elastic3d report /data/gpt-1b/events --json | jq -r .summary
    """
    from elastic3d.report.making import REPORTED, WhatWasLeft, report
    from elastic3d.report.page import page

    try:
        read = read_run(events, run_id, REPORTED)
        bundles, problems = read_bundles(events)
        made = report(
            WhatWasLeft(
                name=read.run_id,
                run=read.run,
                clocks=read.clocks,
                others=read.others,
                bundles=bundles,
                remarks=(*remarks(read), *problems),
            )
        )
        if as_json:
            print(json.dumps({"schema": SCHEMA, **to_json(made)}, indent=2, allow_nan=False), flush=True)
        if output or not as_json:
            text = page(made, written=SYSTEM.wall())
            with whole_file(output or OUTPUT, OUTPUT) as file:
                file.write(text)
            if output != STDOUT and not as_json:
                print(f"{output or OUTPUT}: {size(len(text.encode()))}; {made.summary}")
    except BrokenPipeError:
        raise  # click ends quietly: the reader has read enough
    except OSError as error:
        complain(error)
        raise typer.Exit(1) from None
