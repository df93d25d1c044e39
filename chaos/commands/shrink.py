"""`elastic3d chaos shrink`: the smallest schedule that still breaks the promise that a kept run broke."""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from chaos.commands.numbers import finite
from chaos.commands.storm import INCOMPLETE, AsJson, Preloaded, agents
from chaos.faults.catalogue import feasible
from chaos.report.early import MOST, in_a_line, of_one_run, say
from chaos.report.folder import write_report
from chaos.report.random_documents import SCHEMA, ShrunkDocument
from chaos.report.watching import clean_end
from chaos.schedules.as_test import as_test
from chaos.schedules.files import to_document
from chaos.schedules.schedule import Schedule
from chaos.schedules.smaller import smallest
from chaos.storms.folders import whole_folder, writable_folder
from chaos.storms.storm import VERDICT, Job, keep, kept_storm, play_storm
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UsageError
from elastic3d.values import to_json


def shrink_schedule(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What was kept of a run that failed.")],
    tries: Annotated[int, typer.Option(min=1, help="Most runs to play, beside the first one.")] = 20,
    minutes: Annotated[float, typer.Option(min=0.0, callback=finite, help="Begin no run after so many minutes.")] = 30,
    preloaded: Preloaded = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for what is kept. Default: where FOLDER is.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the smallest schedule that still fails as a kept run did: with fewer faults, then with shorter ones.

    The run is first played again as it was: where it does not fail then, nothing can be said of less. It fails alike
    if the same promise is broken, whatever the numbers are. What is left is kept as shrunk-SEED, a folder like that of
    a run, with a test that plays it. It is no more than the smallest schedule that was tried.

    A try that an error ends counts as one that does not fail. Ctrl-C, a full disk or three errors in a row end the
    search: the smallest schedule until then is kept with its test, and said to be that.

    Exit codes: 0 it was found again, and is kept with what could be left out; 1 it did not fail again, or an error came
    first; 2 the folder is of no run that failed, or what is kept cannot be written; 4 it is kept, but an error ended
    the search; 130 after Ctrl-C.

    Example:

        elastic3d chaos shrink chaos-out/failed-7 --minutes 10
    """
    console = Console(stderr=as_json)
    out = out or folder.absolute().parent
    try:
        schedule, job, promise = failed(folder)
        writable_folder(out)
        console.print(f"looking for less that breaks: {promise}", markup=False, highlight=False)
        with (
            clean_end() as settle,
            agents(preloaded),
            tempfile.TemporaryDirectory(prefix="elastic3d-chaos-") as work,
        ):
            tried = _Tries(job, promise, out, Path(work), console, tries)
            document = tried.play(schedule, number_of(folder, schedule), minutes, SYSTEM, settle)
    except Exception as error:  # noqa: BLE001 - the process's edge
        raise typer.Exit(say(error)) from None
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(document)}))
    elif document.folder is None:
        console.print("It did not fail again, so nothing can be said of less.", style="yellow")
        for fault in schedule.inexact:
            console.print(f"  no replay repeats exactly: {fault}", markup=False, highlight=False)
    else:
        console.print(f"[bold]Left[/]     {', '.join(document.faults)}", highlight=False, soft_wrap=True)
        console.print(f"[bold]Kept[/]     {escape(str(document.folder))}", highlight=False, soft_wrap=True)
        console.print(f"[bold]Test[/]     {escape(str(document.test))}", highlight=False, soft_wrap=True)
        if document.early:
            text = f"The search was ended early, so there may be less: {document.early}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if document.folder is None else tried.code)


def failed(folder: Path) -> tuple[Schedule, Job, str]:
    """Return what was kept of a run that failed, and the promise that was broken; UsageError where it is none."""
    schedule, job = kept_storm(folder)
    try:
        verdict = json.loads((folder / VERDICT).read_text())
        broken = [str(promise["says"]) for promise in verdict["promises"] if promise["broken"]]
    except OSError as error:
        raise UsageError(f"{folder}: it is no folder of a run: {VERDICT}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{folder / VERDICT}: it is no verdict of a run") from None
    if not broken:
        raise UsageError(
            f"{folder}: every promise held in this run, so there is nothing to shrink; give one that failed"
        )
    # In the judge's order: a job that hangs breaks most others, too.
    return schedule, job, broken[0]


def number_of(folder: Path, schedule: Schedule) -> str:
    """Return digits, and underscores between them, by which what is left is named.

    They are the schedule's seed; of a schedule without one, as of a soak, they are of the name of its folder.
    """
    name = folder.absolute().name if schedule.seed is None else str(schedule.seed)
    return re.sub(r"\D+", "_", name).strip("_") or "0"


class _Tries:
    def __init__(self, job: Job, promise: str, out: Path, work: Path, console: Console, most: int) -> None:
        self._job, self._promise, self._out, self._work = job, promise, out, work
        self._console, self._most = console, most
        self._made = self._errors = 0
        self._best = work / "best"
        self._left: Schedule | None = None
        self.code = 0

    def play(
        self, schedule: Schedule, number: str, minutes: float, clock: Clock, settled: Callable[[], object]
    ) -> ShrunkDocument:
        """Look for less, and keep it under a number, as `number_of` has it. `code` is the exit code then.

        settled: called once the search is over, and no signal may interrupt what comes any more. What ends the search
        before anything has failed again is raised, and UsageError where nothing can be kept.
        """
        until, early = clock.monotonic() + 60 * minutes, ""
        try:
            self._search(schedule, lambda: clock.monotonic() < until)
        except SystemExit as end:
            # Of Ctrl-C or SIGTERM.
            if self._left is None:
                raise
            self.code, early = int(end.code or 0), "it was interrupted"
        except Exception as error:  # the process's edge: whatever ends it, the smallest schedule until then is kept
            if self._left is None:
                raise
            say(error)
            self.code, early = INCOMPLETE, in_a_line(error)
        settled()
        left, folder, test = self._left or schedule, None, None
        if self._left is not None:
            with whole_folder(self._out, f"shrunk-{number.replace('_', '.')}") as folder:
                test = folder / f"test_found_{number}.py"
                shutil.copytree(self._best, folder, dirs_exist_ok=True)
                test.write_text(as_test(left, self._job, name=number, promise=self._promise))
                # The page names the folder from which the run is replayed.
                write_report(folder)
        return ShrunkDocument(
            promise=self._promise,
            faults=tuple(map(str, left.faults)),
            before=len(schedule.faults),
            tries=self._made - 1,
            schedule=to_document(left),
            folder=None if folder is None else str(folder),
            test=None if test is None else str(test),
            early=early,
        )

    def _search(self, schedule: Schedule, going: Callable[[], bool]) -> None:
        if self._fails(schedule):
            nodes, slots = self._job.nodes, self._job.slots
            smallest(schedule, self._fails, tries=self._most, nodes=nodes, slots=slots, going=going)

    def _fails(self, schedule: Schedule) -> bool:
        """Play it, and return whether it breaks the promise; what is kept of the last that did is the best.

        Of a chain of smaller and smaller schedules that is the smallest.
        """
        which = f"try {self._made} of {self._most}" if self._made else "again"
        text = f"{which}: {schedule}: "
        job = self._job
        makes, _skipped = feasible(schedule.faults, slots=job.slots, faulty=job.faulty, loopback=job.loopback)
        work = self._work / str(self._made)
        self._made += 1
        if not makes:
            self._console.print(f"{text}cannot be made here", markup=False, highlight=False)
            return False
        silent = Console(file=io.StringIO())
        writable_folder(self._out)
        try:
            storm = play_storm(schedule, self._job, workdir=work, kept=self._out, console=silent)
        except Exception as error:
            # The first one has to be played; a smaller schedule may be one that the job cannot meet.
            refused = isinstance(error, UsageError)
            self._errors += not refused
            if self._left is None or not (refused or of_one_run(error)) or self._errors == MOST:
                raise
            self._console.print(Text(f"{text}cannot be played: {in_a_line(error)}"), soft_wrap=True, highlight=False)
            shutil.rmtree(work, ignore_errors=True)
            return False
        self._errors = 0
        broken = {promise.says for promise in storm.verdict.promises if promise.broken}
        fails = self._promise in broken
        if fails:
            # The one before is still there if this one cannot be kept, or is interrupted.
            kept = keep(storm, self._job, self._work, work)
            shutil.rmtree(self._best, ignore_errors=True)
            self._best, self._left = kept, schedule
        shutil.rmtree(work, ignore_errors=True)
        became = "fails" if fails else f"fails otherwise: {', '.join(sorted(broken))}" if broken else "holds"
        self._console.print(Text(f"{text}{became}"), soft_wrap=True, highlight=False)
        return fails
