"""What `run.evaluate` costs beyond its own passes: beside a loop by hand over the same micro-batches.

Four nodes, or one, hold the demo's model. In each pair the run evaluates it, and each rank passes its share of the same
micro-batches through a whole copy of its own, in alternating order. What is compared is the processor time of all
trainers: it has the passes, the samples' making and the metric on both sides, and on one side all else that elastic3d
does. Time by the clock is longer by what ranks wait for each other, too.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from chaos.bench.spread import spread
from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout

LAYOUTS = ("pp=1,dp=1", "pp=1,dp=4", "pp=2,dp=2")
SCRIPT = Path(__file__).parents[1] / "scripts" / "evaluate_gpt.py"
SAMPLES = 512
BAR = 0.01
"""Share of its own passes that evaluation may cost beyond them."""
PATIENCE = 1800.0


class Timed(NamedTuple):
    """One evaluation on one rank: what it returned, and its seconds of the processor and of the clock."""

    value: float
    processor: float
    seconds: float


Pair = Mapping[str, Sequence[float]]
"""Both ways on one rank, "run" and "hand", as the script writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """What evaluations cost beyond their passes in one layout: shares, one for each pair.

    processor: of processor time, all ranks together. clock: of time, of the slowest rank. seconds: of one evaluation.
    """

    layout: str
    processor: tuple[float, ...]
    clock: tuple[float, ...]
    seconds: tuple[float, ...]


def measure(
    pairs: int, samples: int = SAMPLES, *, say: Callable[[str], None] = lambda text: None
) -> list[EvaluationCost]:
    """Measure all layouts, so many pairs of each."""
    costs = []
    for layout in LAYOUTS:
        say(f"evaluations, {layout}: {pairs} pairs")
        with tempfile.TemporaryDirectory() as folder:
            costs.append(cost_of(layout, samples, _pairs(layout, samples, pairs, Path(folder))))
    return costs


def table(costs: list[EvaluationCost]) -> Table:
    """Return the table for people."""
    shown = Table("layout", "processor time beyond the passes", "time beyond the passes", "one evaluation")
    shown.title = f"evaluations of the demo's model, {len(costs[0].processor)} pairs"
    for cost in costs:
        processor, clock = ([100 * share for share in shares] for shares in (cost.processor, cost.clock))
        shown.add_row(cost.layout, spread(processor, " %"), spread(clock, " %"), spread(cost.seconds))
    return shown


def passed(costs: list[EvaluationCost]) -> bool:
    """Return whether every layout is below the bar, by the median."""
    return all(statistics.median(cost.processor) < BAR for cost in costs)


def _pairs(layout: str, samples: int, pairs: int, folder: Path) -> list[list[Pair]]:
    """Return the pairs of each rank; RuntimeError with what was printed where the job does not end well."""
    out, world = folder / "out", Layout.parse(layout).world
    out.mkdir()
    with EtcdServer() as etcd:
        launch = Launch(
            run_id=f"evaluations-{uuid.uuid4().hex[:8]}",
            endpoint=etcd.endpoint,
            script=SCRIPT,
            script_args=(str(samples), str(pairs), str(out), layout),
            min_nodes=world,
            max_nodes=world,
            conf={"mode": "resident"},
        )
        with Cluster(launch, folder / "nodes") as cluster:
            for number in range(world):
                cluster.start_node(f"node{number}")
            codes = cluster.wait(PATIENCE)
            if set(codes.values()) != {0}:
                raise RuntimeError(f"{layout}: the run ended with {codes}:\n{cluster.tail('node0')}")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


def cost_of(layout: str, samples: int, ranks: Sequence[Sequence[Pair]]) -> EvaluationCost:
    """Return what the pairs of all ranks say; RuntimeError where both ways do not come to the same value."""
    processor, clock, seconds = [], [], []
    for pair in zip(*ranks, strict=True):
        run, hand = ([Timed(*rank[name]) for rank in pair] for name in ("run", "hand"))
        mean = sum(one.value for one in hand) / samples
        if not all(math.isclose(one.value, mean, rel_tol=1e-5) for one in run):
            raise RuntimeError(f"{layout}: run.evaluate returned {run[0].value}, and by hand it is {mean}")
        processor.append(sum(one.processor for one in run) / sum(one.processor for one in hand) - 1)
        seconds.append(max(one.seconds for one in run))
        clock.append(seconds[-1] / max(one.seconds for one in hand) - 1)
    return EvaluationCost(layout=layout, processor=tuple(processor), clock=tuple(clock), seconds=tuple(seconds))
