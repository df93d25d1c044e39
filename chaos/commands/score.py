"""`elastic3d chaos score`: how well the runtime finds what holds a job up."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from chaos.machine.closing import ClosingStack
from chaos.report.early import say
from chaos.report.watching import clean_end
from chaos.score.card import card
from chaos.score.kinds import KINDS
from chaos.score.results import Result
from chaos.score.series import EACH, draw, play_all, steps_of
from chaos.score.shown import document, line, table
from chaos.storms.folders import writable_folder
from elastic3d.errors import UsageError


def score(
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", help=f"What to try: {', '.join(KINDS)}. May be repeated; default: all.", show_default=False
        ),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="How often to try each kind.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of ranks, steps and layouts.")] = 1,
    nodes: Annotated[int, typer.Option(min=2, max=4, help="Most nodes of a job.")] = 4,
    each: Annotated[int, typer.Option(min=1, help="Most faults of one job, one after another.")] = EACH,
    lanes: Annotated[int, typer.Option(min=1, help="Jobs at a time.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Keep logs, events and evidence here. Default: nowhere.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Fail ranks of real jobs in known ways, and count what is found: which class, which node, how soon, which bits.

    Jobs are of torchrun agents on this machine, as in the demo; each meets several faults one after another. The exit
    code is 0 only if every class has a precision of 1, a recall of 0.99, the right node in 98 %, and all jobs end with
    the bits of an undisturbed one. What this machine cannot try, for lack of rights, is shown as skipped. Ctrl-C ends
    it early: nothing is left behind, the card of the trials that were over is printed, and the exit code is 130.

    Examples:

        elastic3d chaos score --kind stop --kind stall

        elastic3d chaos score -n 20 --json > card.json
    """
    console = Console(stderr=as_json)
    results: list[Result] = []
    failure, interrupted, wanted = 0, False, 0

    def hear(result: Result) -> None:
        results.append(result)
        console.print(line(result))

    try:
        for kind in kinds or ():
            if kind not in KINDS:
                raise UsageError(f"--kind {kind!r}: give one of {', '.join(KINDS)}")
        if out is not None:
            writable_folder(out)
            if any(out.iterdir()):
                raise UsageError(f"--out {out}: there is something in it already; give another folder, or empty it")
        drawn = draw(dict.fromkeys(kinds or KINDS, count), seed, each=each, most=nodes)
        wanted = sum(len(series.trials) for series in drawn)
        with clean_end(), ClosingStack() as stack:
            workdir = (
                out.absolute()
                if out is not None
                else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-score-")))
            )
            results[:] = play_all(drawn, workdir=workdir, steps=steps_of(each), lanes=lanes, heard=hear)
    except SystemExit as end:
        # Of Ctrl-C or SIGTERM: everything has ended by now.
        failure, interrupted = int(end.code or 0), True
    except Exception as error:  # noqa: BLE001 - the process's edge: the trials that were over are told
        failure = say(error)
    rows = card(results)
    if as_json and (results or not failure):
        print(json.dumps(document(rows, results, wanted=wanted, interrupted=interrupted)))
    elif results:
        console.print(table(rows))
        if failure:
            console.print(f"It ended early: {len(results)} of {wanted} trials were over.", style="yellow")
    raise typer.Exit(failure or (0 if all(row.passed or not row.trials for row in rows) else 1))
