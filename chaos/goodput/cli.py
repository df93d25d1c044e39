"""`elastic3d simulate goodput`: what a job makes of nodes that come and go."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from chaos.goodput.compare import Contender, Job, Planned, compare
from chaos.goodput.costs import read_costs, written
from chaos.goodput.lives import crowd
from chaos.goodput.plot import goodput_plot
from chaos.goodput.report import Asked, document, shown
from chaos.simulation.trace import UNITS, read_trace, scaled
from chaos.storms.folders import begin_file, in_words
from elastic3d.calibration.record import load
from elastic3d.cli.plan.question import check_size, choose, described, number_for, requested
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.planner.devices import device_named
from elastic3d.planner.shapes import shape_named
from elastic3d.quantities import some_seconds


def goodput(
    trace: Annotated[
        Path | None,
        typer.Option(help="A file of `seconds,nodes held` rows, with the counts before and after a change."),
    ] = None,
    unit: Annotated[str | None, typer.Option("--unit", help=UNITS, show_default=False)] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="A well-known model.")] = "llama-7b",
    device: Annotated[str, typer.Option("--device", help="h200, h100, a100-80g, ..., from its data sheet.")] = "h200",
    calibration: Annotated[
        str, typer.Option("--calibration", metavar="FILE", help="Measured by elastic3d calibrate, instead of --device.")
    ] = "",
    slots: Annotated[int, typer.Option("--slots", help="Devices of each node.")] = 8,
    nodes: Annotated[
        int | None, typer.Option("--nodes", help="Make the trace's largest count this, and others in proportion.")
    ] = None,
    hours: Annotated[float | None, typer.Option("--hours", help="Play so much of the trace only.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="elastic3d, elastic3d-fast, restart or data-parallel-only; give it for each.",
            show_default="all",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option("--layout", metavar="pp=2,...", help="The fixed part; all else is free.", show_default=False)
    ] = "",
    global_batch: Annotated[int, typer.Option("--global-batch", help="Samples of a step.")] = 512,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples that are forwarded together.")] = 1,
    leaf: Annotated[
        int, typer.Option("--leaf", help="Micro-batches that elastic3d adds up before they are sent, as of run.shard.")
    ] = 1,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    announced: Annotated[float, typer.Option("--announced", help="Share of the losses that are, 0 to 1.")] = 0.0,
    notice: Annotated[str, typer.Option("--notice", help="How long before.")] = "2m",
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="Costs of recovery in TOML, instead of the defaults.")
    ] = None,
    cost: Annotated[
        list[str] | None, typer.Option("--cost", metavar="NAME=VALUE", help="One of these costs.", show_default=False)
    ] = None,
    show_costs: Annotated[bool, typer.Option("--show-costs", help="Print them, with their sources, and end.")] = False,
    price: Annotated[
        float | None, typer.Option("--price", help="What a node costs an hour, for figures in money.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of which nodes are lost, and of delays.")] = 1,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw it into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show what a job makes of nodes that come and go, and where its node-seconds and its money go.

    elastic3d's own membership machine and planner follow the trace in virtual time, with the costs of recovering,
    saving and joining, beside a job that only restarts from checkpoints, at the best interval, and one that keeps whole
    data-parallel replicas. All are compared with an oracle that knows the future and pays for nothing. A day of twelve
    nodes takes a minute of computing.

    Examples:

        elastic3d simulate goodput --trace spot.csv --model llama-7b --device h200

        elastic3d simulate goodput --trace spot.csv --announced 1 --price 24 --plot goodput.svg

        elastic3d simulate goodput --trace spot.csv --policy elastic3d --leaf 8 --json

        elastic3d simulate goodput --show-costs > costs.toml

        elastic3d simulate goodput --trace spot.csv --costs costs.toml --cost node_start=60
    """
    try:
        if plot is not None and not show_costs:
            begin_file(plot)
        recovery = read_costs(costs, cost or ())
        if show_costs:
            print(written(recovery), end="")
            return
        if trace is None:
            raise UsageError("--trace: give a file of seconds,nodes rows, as in --trace spot.csv")
        _check(nodes, slots, hours, announced, price, leaf)
        contenders = [choose(Contender, "--policy", name) for name in policy or Contender]
        read = read_trace(trace, unit)
        changes, end = read.changes, read.end
        if nodes is not None:
            changes = scaled(changes, nodes)
        if hours is not None:
            end = min(end, 3600.0 * hours)
        seconds = some_seconds(notice, "--notice")
        people = crowd(changes, end, seed=seed, announced=announced)
        if not people.most:
            raise UsageError(f"--trace {trace}: no node is held in its first {end:g} s; give more of it by --hours")
        sheet = device_named(device)
        number = number_for(sheet, "")
        profile = described(
            model,
            number=number,
            global_batch=global_batch,
            micro_batch=micro_batch,
            context=None,
            recompute=recompute,
            optimizer="adamw",
        )
        if profile.micro_batches % leaf:
            raise UsageError(f"--leaf {leaf}: it does not divide the {profile.micro_batches} micro-batches of a step")
        measured = load(calibration) if calibration else None
        job = Job(
            profile=profile,
            costs=measured.costs() if measured is not None else sheet.costs(number),
            slots=slots,
            request=requested(layout),
            recovery=recovery,
            leaf=leaf,
            notice=seconds,
            seed=seed,
        )
        with _progress() as report:
            comparison = compare(people, Planned(job), contenders, report)
        asked = Asked(
            trace=str(trace),
            seconds=end,
            nodes=people.most,
            model=model,
            device=measured.name if measured is not None else sheet.name,
            slots=slots,
            samples=global_batch,
            tokens=global_batch * shape_named(model).context,
            announced=announced,
            notice=seconds,
            seed=seed,
            recovery=recovery,
            price=price,
        )
        if plot is not None:
            with in_words(plot):
                title = f"{model} on {trace.name}: goodput against the oracle"
                plot.write_text(goodput_plot(title, people, comparison))
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    if as_json:
        print(json.dumps(document(asked, comparison), indent=2))
    else:
        Console(highlight=False).print(shown(asked, comparison))


def _check(
    nodes: int | None,
    slots: int,
    hours: float | None,
    announced: float,
    price: float | None,
    leaf: int,
) -> None:
    check_size(1 if nodes is None else nodes, slots)
    if hours is not None and not 0 < hours < float("inf"):
        raise UsageError(f"--hours {hours:g}: give more than 0")
    if not 0 <= announced <= 1:
        raise UsageError(f"--announced {announced:g}: it is a share of the losses, from 0 for none to 1 for all")
    if price is not None and not 0 <= price < float("inf"):
        raise UsageError(f"--price {price:g}: give what a node costs an hour, 0 or more")
    if leaf < 1:
        raise UsageError(f"--leaf {leaf}: give 1 or more")


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("planning", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)
