"""`make bench`: print the measurements with their spread; `--json` for machines."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from chaos.bench import (
    checkpoints,
    cost,
    evaluations,
    forming,
    health,
    islands,
    islands_link,
    plans,
    recovery,
    reductions,
    restores,
    seeing,
    weights,
)
from chaos.bench.spread import spread
from elastic3d.values import Layout


def main(
    repeats: Annotated[int, typer.Option(help="repeats of each measurement")] = 5,
    only: Annotated[
        str,
        typer.Option(
            help="recovery, islands, cost, reductions, forming, restores, checkpoints, weights, plans, "
            "evaluations, seeing, health; or all"
        ),
    ] = "",
    agents: Annotated[str, typer.Option(help="sizes of the worlds to form")] = ",".join(map(str, forming.AGENTS)),
    width: Annotated[int, typer.Option(help="width of the model whose steps are timed, 10 blocks deep")] = 640,
    gigabytes: Annotated[float, typer.Option(help="size of the state to save, in GB")] = 0.96,
    faults: Annotated[int, typer.Option(min=0, help="faults of the score card of health")] = 360,
    minutes: Annotated[float, typer.Option(min=0, help="minutes of controls in which health must do nothing")] = 10.0,
    lanes: Annotated[int, typer.Option(min=1, help="jobs of the score card at a time")] = 2,
    seed: Annotated[int, typer.Option(help="seed of the score card")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
) -> None:
    """Measure recovery beside its peers, islands, the cost of snapshots and ordered reduction, forming, saving and
    reading, what is read of weights that exist, evaluations, and health.

    The exit code is 1 where evaluating or seeing costs too much, or the score card of health or its controls do not
    pass. Ctrl-C ends the card with what has been played.
    """
    console = Console(stderr=as_json)
    measured: dict[str, object] = {}
    if only in ("", "recovery"):
        recovered = recovery.measure(repeats, say=console.print)
        for table in recovered.tables():
            console.print(table)
        measured["recovery"] = recovered.as_json()
    if only in ("", "islands"):
        apart = islands.measure(repeats, say=console.print)
        console.print(apart.table())
        measured["islands"] = apart.as_json()
        try:
            linked = islands_link.measure(min(repeats, 3), say=console.print)
            console.print(linked.table())
            measured["islands over a slow link"] = linked.as_json()
        except OSError as error:
            console.print(f"islands over a slow link were not measured, for want of root or iproute2: {error}")
    if only in ("", "cost"):
        table = Table("layout", "variant", "seconds per step", "cost", title="cost per step, against the fast variant")
        costs: dict[str, list[dict[str, float]]] = {}
        for layout in (Layout(pp=2, dp=2), Layout(pp=1, dp=4)):
            rounds = []
            for number in range(repeats):
                console.print(f"cost {layout}, round {number + 1} of {repeats}")
                rounds.append(cost.one_round(layout))
            costs[str(layout)] = [r.seconds for r in rounds]
            for variant in cost.VARIANTS:
                share = spread([100 * r.cost(variant) for r in rounds], " %", 1) if variant != cost.BASE else ""
                table.add_row(str(layout), variant, spread([r.seconds[variant] for r in rounds], " s", 3), share)
        console.print(table)
        measured["cost"] = costs
    if only in ("", "reductions"):
        compared = reductions.measure(reductions.Size(width=width, turns=repeats), say=console.print)
        for table in reductions.tables(compared):
            console.print(table)
        measured["reductions"] = [asdict(comparison) for comparison in compared]
    if only in ("", "forming"):
        formed = forming.measure([int(n) for n in agents.split(",")], repeats, say=console.print)
        for table in forming.tables(formed):
            console.print(table)
        measured["forming"] = {
            f"{system} {n}": [asdict(world) for world in worlds] for (system, n), worlds in formed.items()
        }
    if only in ("", "restores"):
        read = restores.measure(repeats, say=console.print)
        console.print(restores.table(read))
        measured["restores"] = asdict(read)
    if only in ("", "checkpoints"):
        saved = checkpoints.measure(repeats, gigabytes, say=console.print)
        for table in checkpoints.tables(saved):
            console.print(table)
        measured["checkpoints"] = saved.as_json()
    if only in ("", "weights"):
        begun = weights.measure(repeats, say=console.print)
        console.print(weights.table(begun))
        measured["weights"] = {layout: [asdict(one) for one in each] for layout, each in begun.items()}
    if only in ("", "plans"):
        planned = plans.measure(repeats, say=console.print)
        console.print(plans.table(planned))
        measured["plans"] = planned.as_json()
    passed = True
    if only in ("", "evaluations"):
        evaluated = evaluations.measure(repeats, say=console.print)
        console.print(evaluations.table(evaluated))
        measured["evaluations"], passed = [asdict(one) for one in evaluated], evaluations.passed(evaluated)
    if only in ("", "seeing"):
        seen = seeing.measure(repeats, say=console.print)
        console.print(seeing.table(seen))
        measured["seeing"], passed = [asdict(one) for one in seen], passed and seeing.passed(seen)
    if only in ("", "health"):
        size = health.Size(faults=faults, minutes=minutes, lanes=lanes, seed=seed, pairs=4 * repeats, width=width)
        judged = health.measure(size, say=console.print, show=console.print)
        measured["health"], passed = judged.as_json(), passed and judged.passed
    if as_json:
        print(json.dumps(measured))
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    # A shell's background jobs begin with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    typer.run(main)
