"""Random schedules from the command line: progress, a report or one JSON document, and whether all passed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chaos.many.runs import Outcome, Tally
from elastic3d.errors import UsageError

_O = TypeVar("_O", bound=Outcome)


def play_and_tell(play_many: Callable[..., Tally[_O]], count: int, seed: int, *, as_json: bool) -> bool:
    """Play the schedules of `count` seeds from `seed` on; print the outcome, and return whether all passed."""
    if count < 1:
        raise UsageError(f"--schedules {count}: give 1 or more")
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
        tally = play_many(seed, count, played=lambda done: progress.update(task, completed=done))
    if as_json:
        print(json.dumps(tally.document()))
        return not tally.failures
    for outcome in tally.failures:
        print(outcome.report())
        print()
    print(tally)
    return not tally.failures


def replay(path: Path, play: Callable[[str], Outcome]) -> bool:
    """Play the schedule of a file, print its outcome, and return whether it passed.

    play: given the file's text. UsageError where it cannot be read.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--replay {path}: cannot be read: {error}") from None
    outcome = play(text)
    print(outcome.report())
    return not outcome.violations
