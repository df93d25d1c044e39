"""What `run.evaluate` costs beyond its own passes: beside a loop by hand over the same micro-batches.

One node, or four, hold the demo's model. In each pair the run evaluates it, and each rank passes its share of the same
micro-batches through a whole copy of its own, in alternating order; what both take of the processor is compared, of all
trainers together. Machines change their speed from one second to the next, so that pairs are short where there is
nothing but passes. Where parameters are sharded a run gathers them, which a copy needs not: what it takes outside of
its own passes, more than the loop by hand takes outside of its, for samples and the metric, is told apart.
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
SHORT = 32
"""Samples of an evaluation on one rank."""
BAR = 0.01
"""Share of its own passes that evaluation may cost beyond them."""
PATIENCE = 1800.0


class Timed(NamedTuple):
    """One evaluation on one rank: what it returned, its seconds of the processor, those in passes, and of the clock."""

    value: float
    processor: float
    passes: float
    seconds: float


Pair = Mapping[str, Sequence[float]]
"""Both ways on one rank, "run" and "hand", as the script writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """What evaluations cost beyond passes in one layout: shares, one for each pair.

    by_hand: of all that the loop by hand takes, by the processor's time of all ranks. outside: what is more outside of
    passes, of the run's own passes; None where stages have parts of them. seconds: by the clock, of one evaluation.
    """

    layout: str
    by_hand: tuple[float, ...]
    outside: tuple[float, ...] | None
    seconds: tuple[float, ...]


def measure(repeats: int, samples: int = 0, *, say: Callable[[str], None] = lambda text: None) -> list[EvaluationCost]:
    """Measure all layouts. samples: of each evaluation, 0 for the usual number."""
    costs = []
    for layout in LAYOUTS:
        alone = Layout.parse(layout).world == 1
        number, pairs = samples or (SHORT if alone else SAMPLES), (40 if alone else 1) * repeats
        say(f"evaluations, {layout}: {pairs} pairs")
        with tempfile.TemporaryDirectory() as folder:
            costs.append(cost_of(layout, number, _pairs(layout, number, pairs, Path(folder))))
    return costs


def table(costs: list[EvaluationCost]) -> Table:
    """Return the table for people."""
    shown = Table("layout", "pairs", "more than by hand", "outside of its own passes", "one evaluation")
    shown.title = "evaluations of the demo's model, of the processor's time"
    for cost in costs:
        outside = "" if cost.outside is None else spread([100 * share for share in cost.outside], " %")
        by_hand = spread([100 * share for share in cost.by_hand], " %", 1)
        shown.add_row(cost.layout, str(len(cost.by_hand)), by_hand, outside, spread(cost.seconds))
    return shown


def passed(costs: list[EvaluationCost]) -> bool:
    """Return whether every layout whose passes can be told apart is below the bar, by the median."""
    return all(statistics.median(cost.outside) < BAR for cost in costs if cost.outside is not None)


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
    by_hand, outside, seconds = [], [], []
    for pair in zip(*ranks, strict=True):
        run, hand = ([Timed(*rank[name]) for rank in pair] for name in ("run", "hand"))
        mean = sum(one.value for one in hand) / samples
        if not all(math.isclose(one.value, mean, rel_tol=1e-5) for one in run):
            raise RuntimeError(f"{layout}: run.evaluate returned {run[0].value}, and by hand it is {mean}")
        (spent, passes), (spent_by_hand, passes_by_hand) = (
            (sum(one.processor for one in way), sum(one.passes for one in way)) for way in (run, hand)
        )
        by_hand.append(spent / spent_by_hand - 1)
        outside.append((spent - passes - (spent_by_hand - passes_by_hand)) / passes if passes else math.nan)
        seconds.append(max(one.seconds for one in run))
    whole = Layout.parse(layout).pp == 1
    return EvaluationCost(
        layout=layout, by_hand=tuple(by_hand), outside=tuple(outside) if whole else None, seconds=tuple(seconds)
    )
