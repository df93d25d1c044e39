"""`elastic3d chaos soak`: what grows in a job that goes on for long."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chaos.growth.draws import DEFAULT, WORDS, check_words
from chaos.growth.measures import measures
from chaos.growth.report import document, keep, passed, shown
from chaos.growth.soak import Plan, play_soak
from chaos.report.watching import clean_end
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.quantities import some_seconds


def soak(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="The script's own arguments.", show_default=False),
    ] = None,
    hours: Annotated[float, typer.Option(min=0.0, help="How long faults are made; added to --minutes.")] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="The same in minutes.")] = 0.0,
    every: Annotated[str, typer.Option(help="Time between two faults, at the pace of the latest steps.")] = "20s",
    script: Annotated[
        Path | None,
        typer.Option(help="A script that calls `elastic3d.run`. Default: a small one of ours.", show_default=False),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, each a torchrun agent; the first is never lost.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 7,
    faults: Annotated[str, typer.Option(metavar="FAULT,...", help=f"What to make, of {', '.join(WORDS)}.")] = ",".join(
        DEFAULT
    ),
    patience: Annotated[float, typer.Option(min=1.0, help="Seconds without an event until it is given up.")] = 180,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for what is kept: a folder per soak.")] = Path(
        "chaos-out"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Keep one job going for hours with a fault every few seconds, and look for what grows.

    Every few seconds the memory, the descriptors and the threads of its processes are looked at, the keys and bytes in
    etcd, and the files of store and events. At the end a robust line through each series says whether it grows. No step
    may have other bits when it is done again, and every sample counts once. It ends when time is over, when a promise
    is broken, or by Ctrl-C, which leaves nothing behind and still reports what was measured. A folder named soak-SEED
    is kept, with growth.json, which has all samples, and growth.svg.

    Exit codes: 0 nothing grows, and every promise held; 1 otherwise; 2 it cannot be played; 130 after Ctrl-C.

    Examples:

        elastic3d chaos soak --minutes 20

        elastic3d chaos soak --hours 24 --every 20s --nodes 3 --seed 7 -o out --json > soak.json

        elastic3d chaos soak --hours 1 --script train.py --faults kill-trainer,kill,join -- --steps 20000
    """
    # Without --json people read standard output; with it they read standard error, and programs the other.
    console = Console(stderr=as_json, highlight=False)
    try:
        plan = _plan(hours, minutes, every, script, nodes, seed, faults, patience, tuple(arguments or ()))
        with ExitStack() as stack:
            stack.enter_context(clean_end())
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-soak-")))
            result = play_soak(plan, workdir=workdir, heard=lambda text: console.print(text, markup=False))
            folder = keep(result, out, workdir)
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    series = measures(result.samples)
    if as_json:
        print(json.dumps(document(result, series) | {"folder": str(folder)}))
    else:
        for name, log in list(result.logs.items())[:1] if result.broken else ():
            console.print(f"The end of {name}'s log", log, sep="\n", markup=False)
        console.print(shown(result, series))
        console.print(f"[bold]Kept[/]     {folder}", soft_wrap=True)
    raise typer.Exit(128 + result.interrupted if result.interrupted else 0 if passed(result, series) else 1)


def _plan(
    hours: float,
    minutes: float,
    every: str,
    script: Path | None,
    nodes: int,
    seed: int,
    faults: str,
    patience: float,
    given: tuple[str, ...],
) -> Plan:
    words = tuple(word.strip() for word in faults.split(",") if word.strip())
    check_words(words, nodes)
    seconds = 3600.0 * hours + 60.0 * minutes
    if not seconds > 0:
        raise UsageError("give how long: --hours 24, or --minutes 20")
    if script is not None and not script.is_file():
        raise UsageError(f"--script {script}: there is no such file")
    if script is None and given:
        raise UsageError(f"{given[0]}: arguments are for a script of your own; give it by --script")
    return Plan(
        seconds=seconds,
        every=some_seconds(every, "--every"),
        nodes=nodes,
        seed=seed,
        words=words,
        script=script.absolute() if script is not None else None,
        given=given,
        patience=patience,
    )
