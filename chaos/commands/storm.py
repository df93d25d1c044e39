"""`elastic3d chaos run` and `chaos replay`: a schedule of faults on a job of anybody's script."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chaos.commands.numbers import finite
from chaos.machine.closing import ClosingStack
from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.setting import RESIDENT, RESTART
from chaos.report import junit
from chaos.report.early import say
from chaos.report.folder import REPORT
from chaos.report.random_documents import replay_command
from chaos.report.view import summary
from chaos.report.watching import clean_end
from chaos.schedules.files import SEED, load
from chaos.schedules.schedule import Schedule
from chaos.storms.storm import Job, Storm, keep, kept_storm, play_storm
from elastic3d.errors import UsageError

INCOMPLETE = 4
"""Exit code where every promise held, but not all faults could be made."""

Out = Annotated[Path, typer.Option("-o", "--out", help="Folder for what is kept: a folder per run, and quiet runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Script = Annotated[Path, typer.Option(help="A script that calls `elastic3d.run`; with `--mode restart` any.")]


class Mode(StrEnum):
    """How a script is run, as `--rdzv-conf=mode=` has it."""

    RESIDENT = RESIDENT
    RESTART = RESTART

    @property
    def conf(self) -> dict[str, str]:
        """What a job keeps of it: nothing of the default."""
        return {} if self is Mode.RESIDENT else {"mode": self.value}


InMode = Annotated[
    Mode,
    typer.Option(
        help="`restart`: any torchrun script, which is restarted at each change of nodes and loads its own checkpoints."
    ),
]
StepPattern = Annotated[
    str,
    typer.Option(
        metavar="REGEX",
        help="Under `--mode restart`: what a line has that tells a step, with one group around its digits. "
        "Default: `step 12`, `step=12` and the like.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGUMENT...]",
        help="The script's own arguments. {seed}, {out}, {events} and {store} in them are filled in.",
        show_default=False,
    ),
]
Patience = Annotated[
    float, typer.Option(min=1.0, callback=finite, help="Seconds without an event until a run is given up.")
]
NoticedBars = Annotated[
    float | None,
    typer.Option(
        "--bars",
        metavar="FACTOR",
        help="Judge how soon faults are noticed: within FACTOR times the bar of `chaos list`. Default: told only.",
        show_default=False,
    ),
]
Recovery = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Judge how soon the next step follows a fault. Default: told only.",
        show_default=False,
    ),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Judge losses instead of bits: each within SHARE of the undisturbed run's. Default: the same bits.",
        show_default=False,
    ),
]
JUnit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write what was judged as JUnit XML.", show_default=False),
]
Loopback = Annotated[
    bool,
    typer.Option(
        "--loopback",
        help="Keep all nodes on this machine's loopback, for a script that needs the internet. Otherwise each is a "
        "host of its own where root can make that.",
    ),
]
Preloaded = Annotated[
    bool,
    typer.Option(
        "--preloaded",
        help="Fork agents and trainers from one process that has imported torch: quicker, where nothing that your "
        "script sets has to be there before torch is imported.",
    ),
]
Compare = Annotated[bool, typer.Option(help="Compare with an undisturbed run, which is played once and kept.")]


@contextmanager
def agents(preloaded: bool) -> Iterator[None]:
    """Start agents as `--preloaded` says while the block runs: fresh ones unless an outer block says otherwise."""
    with ClosingStack() as stack:
        if preloaded:
            stack.enter_context(started_by(stack.enter_context(PreloadedServer())))
        yield


def run_schedule(
    schedule: Annotated[Path, typer.Argument(metavar="SCHEDULE", help="The faults: a file of TOML or JSON.")],
    script: Script,
    arguments: Arguments = None,
    mode: InMode = Mode.RESIDENT,
    step_pattern: StepPattern = "",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes to start with, each a torchrun agent.")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Trainers per node.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(help=f"Draws what the schedule leaves open. Default: its own, or {SEED}.", show_default=False),
    ] = None,
    patience: Patience = 180,
    bars: NoticedBars = None,
    recovery: Recovery = None,
    loopback: Loopback = False,
    tolerance: Tolerance = None,
    compare: Compare = True,
    out: Out = Path("chaos-out"),
    cases: JUnit = None,
    as_json: AsJson = False,
) -> None:
    """Break a job of your own script on this machine as a schedule says, and judge what becomes of it.

    Its nodes are torchrun agents with an etcd and a store of their own: the store that the script names is not touched.
    The same job undisturbed says what is right: the same bits, every sample once, the last step saved. Less is asked of
    a script under `--mode restart`. Nothing is left behind, after Ctrl-C neither. A folder named passed-SEED or
    failed-SEED, by the schedule's seed if it has one, is kept, with a report as a page of HTML; `elastic3d chaos
    replay` plays it again.

    Exit codes: 0 every promise held; 1 one was broken; 2 the schedule or the script cannot be played, or what is kept
    cannot be written; 4 every promise held, but faults were skipped for what this machine or the job lacks.

    Examples:

        elastic3d chaos run storm.toml --script train.py --nodes 4 --seed 7

        elastic3d chaos run storm.json --script train.py -o out --json -- --seed {seed} --steps 60

        elastic3d chaos run storm.toml --script ddp.py --mode restart -- --out {out}

        elastic3d chaos run storm.toml --script ddp.py --mode restart --step-pattern 'iter: *(\\d+)' -- --out {out}

        elastic3d chaos run storm.toml --script train.py --tolerance 1e-3 -- --reduction fast
    """

    def given() -> tuple[Schedule, Job]:
        drawn = load(schedule, nodes=nodes, seed=seed)
        chosen = next(one for one in (seed, drawn.seed, SEED) if one is not None)
        job = Job(
            script=str(script.absolute()),
            arguments=tuple(arguments or ()),
            nodes=nodes,
            slots=slots,
            seed=chosen,
            conf=mode.conf,
            patience=patience,
            bars=bars,
            recovery=recovery,
            loopback=loopback,
            tolerance=tolerance,
            step_pattern=step_pattern,
        )
        if tolerance is not None and not compare:
            raise UsageError("--tolerance: it is of the losses of an undisturbed run; leave out --no-compare")
        return drawn, job

    _run(given, "run", script.name, out=out, compare=compare, cases=cases, as_json=as_json)


def replay(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `elastic3d chaos run` has kept.")],
    compare: Compare = True,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for what is kept. Default: where FOLDER is.", show_default=False),
    ] = None,
    cases: JUnit = None,
    as_json: AsJson = False,
) -> None:
    """Play again what was kept of a run: the same script, nodes and faults at the same moments.

    What lasts for real seconds does not cover the same part of the job again, and is named. The script is the file
    that it was, as it is now. Exit codes are those of `elastic3d chaos run`.

    Example:

        elastic3d chaos replay chaos-out/failed-7
    """
    out = out or folder.absolute().parent
    _run(lambda: kept_storm(folder), "replay", folder.name, out=out, compare=compare, cases=cases, as_json=as_json)


def _run(
    given: Callable[[], tuple[Schedule, Job]],
    command: str,
    name: str,
    *,
    out: Path,
    compare: bool,
    cases: Path | None,
    as_json: bool,
) -> None:
    # Without --json people read standard output; with it they read standard error, and programs the other.
    console = Console(stderr=as_json)
    folder, failure, suite = None, 0, f"elastic3d chaos {command}"
    try:
        if cases is not None:
            junit.begin(cases, suite, name)
        schedule, job = given()
        with ExitStack() as stack:
            settle = stack.enter_context(clean_end())
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic3d-chaos-")))
            storm = play_storm(schedule, job, workdir=workdir, kept=out, console=console, compare=compare)
            settle()
            try:
                folder = keep(storm, job, out, workdir)
            except UsageError as error:
                # What was judged is told all the same.
                failure = say(error)
    except Exception as error:  # noqa: BLE001 - the process's edge
        raise typer.Exit(say(error)) from None
    if as_json:
        print(json.dumps(storm.document() | {"folder": None if folder is None else str(folder)}))
    else:
        console.print(report(storm))
    if folder is not None and not as_json:
        console.print(f"[bold]Kept[/]     {escape(str(folder))}", highlight=False, soft_wrap=True)
        console.print(f"[bold]Report[/]   {escape(str(folder / REPORT))}", highlight=False, soft_wrap=True)
        if not storm.kept:
            console.print(f"[bold]Replay[/]   {escape(replay_command(folder))}", highlight=False, soft_wrap=True)
    if cases is not None:
        try:
            junit.write(cases, suite, Path(job.script).name, tuple(storm_cases(storm, folder)))
        except UsageError as error:
            failure = say(error)
    raise typer.Exit(1 if not storm.kept else failure or (INCOMPLETE if storm.skipped else 0))


def storm_cases(storm: Storm, folder: Path | None) -> Iterator[junit.Case]:
    """Yield a case per promise, and one per fault that was skipped. folder: what is kept of it."""
    replay = () if folder is None else (f"replay: {replay_command(folder)}",)
    yield from junit.promise_cases(storm.verdict.promises, replay)
    for fault, why in storm.skipped:
        yield junit.Case(name=str(fault), skipped=why)


def report(storm: Storm) -> RenderableType:
    """Return what became of a storm for a terminal."""
    table = Table(title="Faults", title_justify="left", title_style="bold")
    for name in ("fault", "noticed by", "after"):
        table.add_column(name)
    for notice in storm.notices:
        after = f"{notice.after:.2f} s" if notice.after is not None else "never"
        table.add_row(str(notice.fault), notice.detector, after)
    noticed = [notice.fault for notice in storm.notices]
    for fault, _ in storm.outcome.made:
        if fault not in noticed:
            table.add_row(str(fault), "", "")
    for fault, why in storm.skipped:
        table.add_row(str(fault), Text(f"skipped: {why}", style="yellow"), "")
    parts: list[RenderableType] = [table, Text(), summary(storm.outcome, storm.verdict)]
    inexact = storm.schedule.inexact
    if inexact:
        parts.append(Text(f"No replay repeats exactly: {', '.join(map(str, inexact))}", style="dim"))
    return Group(*parts)
