"""`elastic3d chaos random`: one job of anybody's script again and again, each time with another drawn schedule."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaos.commands.numbers import finite
from chaos.commands.storm import (
    INCOMPLETE,
    Arguments,
    AsJson,
    InMode,
    JUnit,
    Loopback,
    Mode,
    NoticedBars,
    Out,
    Patience,
    Preloaded,
    Recovery,
    Script,
    StepPattern,
    Tolerance,
    agents,
)
from chaos.report import junit
from chaos.report.early import MOST, in_a_line, say
from chaos.report.random_documents import SCHEMA, DrawnRun, RandomDocument, RunVerdict, SkippedFault
from chaos.report.watching import clean_end
from chaos.schedules.restart import TELL
from chaos.schedules.sure import ANY
from chaos.storms.folders import writable_folder
from chaos.storms.random_runs import Chances, draw_run, play_run, saved_step, words_of
from chaos.storms.storm import Job, undisturbed
from elastic3d.clock import SYSTEM
from elastic3d.errors import UsageError
from elastic3d.values import to_json

RUNS = 10
"""Runs where neither their number nor a time is given."""
_STYLES = {
    RunVerdict.KEPT: "green",
    RunVerdict.BROKEN: "bold red",
    RunVerdict.PARTLY: "yellow",
    RunVerdict.SKIPPED: "yellow",
    RunVerdict.ERROR: "bold red",
}


def play_random(
    script: Script,
    arguments: Arguments = None,
    mode: InMode = Mode.RESIDENT,
    step_pattern: StepPattern = "",
    seed: Annotated[int, typer.Option(help="Seed of the first run, and of the job; each later run has the next.")] = 7,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Runs to play. Default: 10, or as many as --minutes has room for.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Begin no run after so many minutes. Default: all --runs."),
    ] = None,
    each: Annotated[str, typer.Option(help="Faults of a run: a number, or the fewest and the most.")] = "3..5",
    faults: Annotated[
        str, typer.Option(help="Draw these only: words of `elastic3d chaos list`, with commas between.")
    ] = "",
    nodes: Annotated[int, typer.Option(min=2, help="Most nodes to start with; the fewest are 2.")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Most trainers per node.")] = 1,
    least: Annotated[
        int, typer.Option(min=1, help="Nodes that every schedule leaves, where the script needs more than its layout.")
    ] = 1,
    patience: Patience = 180,
    bars: NoticedBars = None,
    recovery: Recovery = None,
    loopback: Loopback = False,
    tolerance: Tolerance = None,
    preloaded: Preloaded = False,
    out: Out = Path("chaos-out"),
    report: JUnit = None,
    as_json: AsJson = False,
) -> None:
    """Break a job of your own script again and again, each time with other nodes and a schedule drawn from a seed.

    The job is the same each time and is played undisturbed once, so that each run is judged as `elastic3d chaos run`
    judges. Only what this machine can make is drawn, and only what surely happens and leaves the job a way to go on;
    what is left out for that is said. With --faults everything named is drawn, and skipped where it cannot be made.
    A run in which a promise was broken is kept as failed-SEED. One that an error ends counts as an error, and the next
    one is played; three in a row end everything, as Ctrl-C and a full disk do. What was played until then is told and
    written all the same, and in JUnit XML the rest counts as an error.

    Exit codes: 0 every promise held; 1 one was broken, or an error ended a run; 2 it cannot be played, or --out or
    --junit cannot be written; 4 every promise held, but faults were skipped; 130 after Ctrl-C.

    Examples:

        elastic3d chaos random --script train.py --seed 7 --runs 20

        elastic3d chaos random --script train.py --minutes 60 --faults kill,stop,join --junit chaos.xml -- --steps 60
    """
    console = Console(stderr=as_json)
    played: list[DrawnRun] = []
    left_out: tuple[SkippedFault, ...] = ()
    steps, failure, interrupted, error, doing = 0, 0, False, "", ""
    suite = "elastic3d chaos random"
    try:
        if report is not None:
            junit.begin(report, suite, script.name)
        job = Job(
            script=str(script.absolute()),
            arguments=tuple(arguments or ()),
            nodes=nodes,
            slots=slots,
            seed=seed,
            conf=mode.conf,
            patience=patience,
            bars=bars,
            recovery=recovery,
            loopback=loopback,
            tolerance=tolerance,
            step_pattern=step_pattern,
        )
        job.setting()
        bounds = numbers(each)
        with clean_end():
            # What this machine can make is tried, and has to be undone.
            words, left_out = words_of(faults, slots, resident=job.resident, loopback=loopback)
        if least > nodes:
            raise UsageError(f"--least {least}: it is more than --nodes {nodes}")
        writable_folder(out)
        doing = "the undisturbed run"
        with clean_end(), agents(preloaded):
            for why, of_it in by_reason(left_out):
                console.print(f"left out: {', '.join(of_it)}: {why}", style="dim", markup=False, highlight=False)
            with tempfile.TemporaryDirectory(prefix="elastic3d-chaos-") as folder:
                setting, quiet = undisturbed(job, workdir=Path(folder), kept=out, console=console)
            steps = setting.steps
            if not steps:
                raise UsageError(f"{script.name}: it tells no step to draw from; {TELL}")
            chances = Chances(
                words=words,
                each=bounds,
                nodes=nodes,
                slots=slots,
                least=least,
                asked=quiet.asked or ANY,
                steps=steps,
                saved=saved_step(quiet.picture.checkpoints, steps),
            )
            for number in seeds(seed, runs, minutes, SYSTEM.monotonic):
                doing = f"seed {number}"
                schedule, drawn = draw_run(number, chances, job)
                waiting = f"seed {number}: {drawn.nodes} nodes: {schedule}"
                with console.status(Text(waiting)) if console.is_terminal else nullcontext():
                    run = play_run(schedule, drawn, kept=out, out=out)
                played.append(run)
                console.print(line(run), soft_wrap=True, highlight=False)
                if failing(played):
                    error = f"errors ended {MOST} runs in a row; the last one, of {doing}: {run.error}"
                    break
    except SystemExit as end:
        # Of Ctrl-C or SIGTERM: everything has ended by now.
        failure, interrupted = int(end.code or 0), True
    except Exception as raised:  # noqa: BLE001 - the process's edge: whatever ends it, what was played is told
        failure, error = say(raised), f"{doing}: {in_a_line(raised)}"
    if not doing:
        raise typer.Exit(failure)
    document = RandomDocument(
        script=script.name,
        seed=seed,
        steps=steps,
        left_out=left_out,
        runs=tuple(played),
        interrupted=interrupted,
        error=error,
    )
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(document)}))
    elif played:
        console.print(summary(document))
    if report is not None:
        try:
            junit.write(report, suite, script.name, tuple(junit.drawn_cases(document)))
        except UsageError as raised:
            failure = failure or say(raised)
    raise typer.Exit(exit_code(document, failure))


def numbers(each: str) -> tuple[int, int]:
    """Return the fewest and the most faults that `--each` asks for; UsageError where it says something else."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", each)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise UsageError(f"--each {each!r}: give a number such as 3, or the fewest and the most such as 3..5")
    return fewest, most


def seeds(first: int, runs: int | None, minutes: float | None, now: Callable[[], float]) -> Iterator[int]:
    """Yield a seed for each run: one at least, and no more once `runs` are made or `minutes` over."""
    most = runs if runs is not None else RUNS if minutes is None else sys.maxsize
    until = None if minutes is None else now() + 60 * minutes
    for number in range(most):
        if number and until is not None and now() >= until:
            return
        yield first + number


def failing(runs: Sequence[DrawnRun]) -> bool:
    """Return whether errors ended so many runs in a row that none is begun after them."""
    return len(runs) >= MOST and all(run.verdict is RunVerdict.ERROR for run in runs[-MOST:])


def by_reason(left_out: tuple[SkippedFault, ...]) -> Iterator[tuple[str, list[str]]]:
    """Yield each reason for which faults are left out, with their words."""
    reasons = dict.fromkeys(one.why for one in left_out)
    for why in reasons:
        yield why, [one.fault for one in left_out if one.why == why]


def line(run: DrawnRun) -> Text:
    """Return what became of a run: a line, and of one that failed what to do next."""
    nodes = f"{run.nodes} nodes" + (f" x {run.slots}" if run.slots > 1 else "")
    text = Text(f"seed {run.seed}: {nodes}: {', '.join(run.faults)}: ")
    text.append(run.verdict, _STYLES[run.verdict])
    text.append(f", {run.seconds:.1f} s")
    if run.error:
        text.append(f"\n    {run.error}", "red")
    for one in run.skipped:
        text.append(f"\n    skipped: {one.fault}: {one.why}", "yellow")
    for promise in run.broken:
        text.append(f"\n    {promise}", "red")
    if run.unkept:
        text.append(f"\n    not kept: {run.unkept}", "yellow")
    for command in filter(None, (run.replay, run.shrink)):
        text.append(f"\n    {command}")
    return text


def summary(document: RandomDocument) -> RenderableType:
    """Return the totals of all runs for a terminal."""
    runs = document.runs
    totals = {
        "runs": len(runs),
        **{verdict.value: document.count(verdict) for verdict in RunVerdict},
        "faults": sum(len(run.faults) for run in runs),
        "skipped faults": sum(len(run.skipped) for run in runs),
        "generations": sum(run.generations for run in runs),
        "steps repeated": sum(run.steps_repeated for run in runs),
        "time": f"{document.seconds:.0f} s",
    }
    # One below the other, since side by side they are wider than a terminal.
    table = Table(title="Random schedules", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, total in totals.items():
        table.add_row(name, str(total))
    early = [Text(f"It was ended early: {document.early}.", style="yellow")] if document.early else []
    return Group(Text(), table, *early)


def exit_code(document: RandomDocument, failure: int = 0) -> int:
    """Return 1 where a promise was broken or an error ended a run, INCOMPLETE where faults were skipped, else 0.

    failure: of what ended the runs, which is returned unless a promise was broken; after a signal in any case.
    """
    if document.interrupted:
        return failure
    if document.count(RunVerdict.BROKEN) or document.count(RunVerdict.ERROR):
        return 1
    return failure or (INCOMPLETE if any(run.skipped for run in document.runs) else 0)
