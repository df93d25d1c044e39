"""`elastic3d chaos soak`: what grows in a job that goes on for long."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from chaos.commands.numbers import finite
from chaos.commands.storm import INCOMPLETE, JUnit, Patience
from chaos.growth.draws import DEFAULT, WORDS, check_words
from chaos.growth.measures import Measure, measures
from chaos.growth.report import again, append, begin, cases, document, keep, shown
from chaos.growth.soak import TRAIN_SOAK, Plan, Soak, play_soak
from chaos.growth.verdict import SoakVerdict, verdict
from chaos.report import junit
from chaos.report.early import say
from chaos.report.folder import REPORT
from chaos.report.watching import clean_end
from elastic3d.errors import UsageError
from elastic3d.quantities import some_seconds


def soak(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="The script's own arguments.", show_default=False),
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="How long faults are made; added to --minutes.")
    ] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.0, callback=finite, help="The same in minutes.")] = 0.0,
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
    patience: Patience = 180,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for what is kept: a folder per soak.")] = Path(
        "chaos-out"
    ),
    junit_file: JUnit = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Keep one job going for hours with a fault every few seconds, and look for what grows.

    Every few seconds the memory, the descriptors and the threads of its processes are looked at, the keys and bytes in
    etcd, and the files of store and events. At the end a robust line through each series says whether it grows. No step
    may have other bits when it is done again, and every sample counts once. It ends when time is over, when a promise
    is broken, or by Ctrl-C, which leaves nothing behind and still reports what was measured, as an error does. A folder
    named soak-SEED is kept, with a report as a page of HTML, growth.json, growth.svg, samples.jsonl, which grows
    meanwhile, and what was done as a schedule: `elastic3d chaos replay` plays it again.

    Exit codes: 0 nothing grows, and every promise held; 1 something grows, a promise was broken, or an error ended it;
    2 it cannot be played, or what is kept cannot be written; 4 nothing is wrong, but it was too short to tell, or ended
    before its time; 130 after Ctrl-C.

    Examples:

        elastic3d chaos soak --minutes 20

        elastic3d chaos soak --hours 24 --every 20s --nodes 3 --seed 7 -o out --json > soak.json

        elastic3d chaos soak --hours 1 --script train.py --faults kill-trainer,kill,join -- --steps 20000
    """
    # Without --json people read standard output; with it they read standard error, and programs the other.
    console = Console(stderr=as_json, highlight=False)
    failure, kept, suite, name = 0, False, "elastic3d chaos soak", (script or TRAIN_SOAK).name
    try:
        if junit_file is not None:
            junit.begin(junit_file, suite, name)
        plan = _plan(hours, minutes, every, script, nodes, seed, faults, patience, tuple(arguments or ()))
        folder = begin(plan, out)
        with ExitStack() as stack:
            settle = stack.enter_context(clean_end())
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-soak-")))
            result = play_soak(
                plan,
                workdir=workdir,
                heard=lambda text: console.print(text, markup=False),
                sampled=lambda sample: append(folder, sample),
                settled=settle,
            )
            try:
                keep(result, folder, workdir)
                kept = True
            except Exception as error:  # noqa: BLE001 - what was measured is told all the same
                failure = say(error)
    except Exception as error:  # noqa: BLE001 - the process's edge
        raise typer.Exit(say(error)) from None
    series = measures(result.samples)
    if as_json:
        print(json.dumps(document(result, series) | {"folder": str(folder)}))
    else:
        for name, log in list(result.logs.items())[:1] if result.broken else ():
            console.print(f"The end of {name}'s log", log, sep="\n", markup=False)
        console.print(shown(result, series))
        console.print(f"[bold]Kept[/]     {escape(str(folder))}", soft_wrap=True)
        if kept:
            console.print(f"[bold]Report[/]   {escape(str(folder / REPORT))}", soft_wrap=True)
        if result.broken and result.made and kept:
            console.print(f"[bold]Replay[/]   {escape(again(folder))}", soft_wrap=True)
    if junit_file is not None:
        try:
            junit.write(junit_file, suite, name, tuple(cases(result, series, folder if kept else None)))
        except UsageError as error:
            failure = say(error)
    raise typer.Exit(exit_code(result, series, failure))


def exit_code(result: Soak, series: Sequence[Measure], failure: int = 0) -> int:
    """Return the exit code. failure: that of what could not be written; what was shown to be wrong comes before it."""
    if result.interrupted:
        return 128 + result.interrupted
    became = verdict(result, series)
    if became is SoakVerdict.FAILED:
        return 1
    return failure or (INCOMPLETE if became is SoakVerdict.SHORT else 0)


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
