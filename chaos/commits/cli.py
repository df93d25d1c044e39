"""`elastic3d simulate commits`: the commit protocol under random schedules."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chaos.commits.run import Outcome, play, play_many
from chaos.commits.schedule import parse
from chaos.many import Tally
from elastic3d.errors import Elastic3dError, UsageError


def commits(
    schedules: Annotated[int, typer.Option(help="How many random schedules.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Of the first one; each next has the next seed.")] = 1,
    replay: Annotated[
        Path | None, typer.Option(help="Instead of random ones, the schedule in this file, as a failure prints it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Save, fence, commit, restore and collect with the real functions, over a model of an object store.

    Ranks, leaders (also several, also zombies), readers and collectors take turns at store operations; processes die,
    requests and answers are lost, repeated, or arrive late. After every operation `latest` has to name a complete
    checkpoint of one step, and nothing that was committed may be lost. A failure is printed as a small schedule that
    --replay plays again. The exit code is 1 if anything happened that must not.

    Examples:

        elastic3d simulate commits --schedules 10000 --seed 7

        elastic3d simulate commits --json | jq .failures

        elastic3d simulate commits --replay failure.txt
    """
    try:
        if schedules < 1:
            raise UsageError(f"--schedules {schedules}: give 1 or more")
        kept = _replay(replay) if replay is not None else _random(schedules, seed, as_json)
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if kept else 1)


def _replay(path: Path) -> bool:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--replay {path}: cannot be read: {error}") from None
    outcome = play(parse(text))
    print(outcome.report())
    return not outcome.violations


def _random(count: int, seed: int, as_json: bool) -> bool:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("schedules", total=count)
        tally = play_many(seed, count, told=lambda done: progress.update(task, completed=done))
    if as_json:
        print(json.dumps(_document(tally)))
        return not tally.failures
    for outcome in tally.failures:
        print(outcome.report())
        print()
    print(tally)
    return not tally.failures


def _document(tally: Tally[Outcome]) -> dict[str, object]:
    return {
        "schedules": tally.schedules,
        "seconds": round(tally.seconds, 3),
        **tally.counts,
        "failures": [
            {
                "seed": outcome.schedule.job.seed,
                "schedule": str(outcome.schedule),
                "violations": outcome.violations,
                "operations": outcome.lines,
            }
            for outcome in tally.failures
        ],
    }
